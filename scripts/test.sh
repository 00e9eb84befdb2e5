#!/usr/bin/env bash
# The README's test command: linters, then every tier in one pytest run of two workers. Tests that this machine can't
# run are skipped and say why. pytest's closing line is the last one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/lint.sh
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} .venv/bin/python -m pytest -n 2 --dist loadgroup
