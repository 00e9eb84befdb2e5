#!/usr/bin/env bash
# Remove what can be made again. build/ is a stage of the pipeline and is never touched.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case ${1:-} in
    caches)
        rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .setuptools-build
        find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
        ;;
    engines) find engines -mindepth 1 -maxdepth 1 -type d -exec rm -rf {} + ;;
    venv) rm -rf .venv ;;
    *)
        echo "clean.sh: got '${1:-}', allowed: caches, engines, venv" >&2
        exit 2
        ;;
esac
