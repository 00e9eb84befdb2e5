#!/usr/bin/env bash
# What the sources must pass before the tests are worth running.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
