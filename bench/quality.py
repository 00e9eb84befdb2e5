"""What each KV cache costs in quality: KL to the fp16 cache, perplexity, top-1 agreement, by position.

Every record compares a fake-quantized cache (see `quality_attention`) with the fp16 cache of the same model on the same
tokens. Statistics come from calibrate/prompts, results from eval/data.

    python -m bench.quality --model smollm2-135m --windows 24 --tokens 1024 --sets ours,peers
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from bench.measured_commit import measured_commit
from bench.quality_measure import Bench
from bench.quality_models import Subject, load_subject
from bench.quality_table import SETS
from nibble import atomic
from nibble.paths import REPOSITORY_ROOT
from nibble.stage import console, run_stage

RESULTS = REPOSITORY_ROOT / "bench" / "results" / "quality.json"


def main() -> None:
    """Measure what the command line asks for and merge the records into the results."""
    arguments = _parser().parse_args()
    schemes = [scheme for name in arguments.sets.split(",") for scheme in SETS[name]]
    subject = load_subject(arguments.model, arguments.device)
    bench = Bench(
        subject.model,
        subject.calibration(arguments.calibration),
        arguments.batch,
        arguments.positions or subject.positions,
        step=arguments.step,
    )
    windows = subject.windows(arguments.text, arguments.windows, arguments.tokens)
    reference = bench.reference(windows)
    records = []
    for scheme in schemes:
        start = time.monotonic()
        measured = bench.measure(windows, reference, scheme)
        size = subject.head_dim
        record = {
            "model": subject.name,
            "format": scheme.name,
            **measured.record(),
            "bytes_per_token": scheme.bytes_per_token(size) * subject.num_kv_heads * subject.num_layers,
            "bytes_per_token_and_head": scheme.bytes_per_token(size),
            "text": arguments.text,
            "commit": measured_commit(),
            "device": torch.cuda.get_device_name() if arguments.device.startswith("cuda") else arguments.device,
        }
        records.append(record)
        console.print(f"{scheme.name:40} {record['kl_mean']:<10} p99.9 {record['kl_p999']:<8} ppl "
                      f"{record['ppl_delta_pct']:+.3f} %  top-1 {record['top1_agreement']}  "
                      f"{record['bytes_per_token_and_head']:.1f} B  {time.monotonic() - start:.1f} s")  # fmt: skip
        merge(arguments.out, records)
    print(json.dumps({"records": len(records), "model": subject.name}))


def merge(path: Path, records: list[dict[str, Any]]) -> None:
    """Add records to a results file; a record replaces one of the same model, format, text, window length
    and (of biased models) relative size of the bias."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    by_key = {_key(record): record for record in [*found, *records]}
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(by_key[key]) for key in sorted(by_key))
    atomic.write_text(path, f"[\n{lines}\n]\n")


def _key(record: dict[str, Any]) -> tuple[Any, ...]:
    return record["model"], record["window_tokens"], record["text"], record.get("relative", 0.0), record["format"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description="Quality of KV caches.")
    parser.add_argument("--model", default="smollm2-135m", help="a name of bench/quality_models.py")
    parser.add_argument("--sets", default="ours,peers", help=f"of {', '.join(SETS)}")
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=1024, help="of a window")
    parser.add_argument("--text", default="eval", choices=("eval", "calibration"))
    parser.add_argument("--calibration", type=int, default=4, help="windows of 1,024 tokens that statistics come from")
    parser.add_argument("--positions", type=int, help="that calibration is spread over (default: the model's longest)")
    parser.add_argument("--step", type=int, default=1, help="compare the last position of every so many tokens")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser


__all__ = ["Subject", "main", "merge"]

if __name__ == "__main__":
    run_stage(main)
