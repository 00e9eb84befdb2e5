#!/usr/bin/env bash
# The main job, stage by stage: an int4-KV engine and its fp16 twin, the comparison, signed, and one query through Triton.
#   MODEL=smollm2-135m N=64 bash scripts/demo.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

MODEL=${MODEL:-smollm2-135m}
N=${N:-64}

stage() {
    printf '\n\033[1m$ python -m %s\033[0m\n' "$*"
    .venv/bin/python -m "$@"
}

stage calibrate.run --model "$MODEL" --n "$N"
stage build.run --model "$MODEL" --kv int4
stage build.run --model "$MODEL" --kv fp16
stage eval.certify --model "$MODEL" --kv int4 --quick
stage serve.run --model "$MODEL" --kv int4 --certificate refuse --check
