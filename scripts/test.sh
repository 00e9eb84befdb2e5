#!/usr/bin/env bash
# The README's test command: linters, then every tier. Tests that this machine can't run are skipped and say why.
# Three runs of pytest go side by side: the compiler's (at low priority), the tiers of the real model and of Triton, and the
# rest. The closing line of the second is the last one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/lint.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
logs=$(mktemp -d)
set -m  # without job control a background run, and each server that it starts, would ignore Ctrl-C's signal
nice .venv/bin/python -m pytest -m compiler >"$logs/compiler" 2>&1 &
compiler=$!
.venv/bin/python -m pytest -m 'model or triton' >"$logs/real" 2>&1 &
real=$!
trap 'kill -- "-$compiler" "-$real" 2>/dev/null || true; rm -rf "$logs"' EXIT
status=0
.venv/bin/python -m pytest -m 'not model and not triton and not compiler' || status=$?
wait "$compiler" || status=$?
cat "$logs/compiler"
wait "$real" || status=$?
cat "$logs/real"
exit "$status"
