#!/usr/bin/env bash
# The README's test command: linters, then every tier. Tests that this machine can't run are skipped and say why.
# Two runs of pytest go side by side: the tiers of the real model and of Triton, and the rest. The closing line of the
# former is the last one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/lint.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
log=$(mktemp)
set -m  # without job control a background run, and each server that it starts, would ignore Ctrl-C's signal
.venv/bin/python -m pytest -m 'model or triton' >"$log" 2>&1 &
real=$!
trap 'kill -- "-$real" 2>/dev/null || true; rm -f "$log"' EXIT
status=0
.venv/bin/python -m pytest -m 'not model and not triton' || status=$?
wait "$real" || status=$?
cat "$log"
exit "$status"
