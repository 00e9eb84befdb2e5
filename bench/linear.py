"""Matrix products of a decode step: how much of the plain reading bandwidth they reach, by the library and by shares.

    python -m bench.linear      # into bench/results/linear.json and nibble/runtime/shares.json

A graph runs one product over several weights, so that nothing is in L2. The shares that beat the library clearly become
the table that the runtime reads. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from bench.attention_cache import graph_median_us, read_bandwidth
from nibble.runtime.decoder_products import SHARES_FILE, Share
from nibble.runtime.linear_kernels import multiply_shares

RESULTS = Path(__file__).parent / "results" / "linear.json"
LAUNCHES_READ_BYTES = 600_000_000  # of one graph, at least
TOKENS = {1: 16, 64: 64}  # measured at -> good up to: tokens are padded to 16, 32 and 64
CLEARLY_FASTER = 0.97
PARTS_US = 1.0  # what adding parts up costs whoever reads them
LARGEST_ERROR = 5e-3  # relative
SHAPES = {  # llama-8b: rows and columns of the weight, and shares that come out even on 132 multiprocessors
    "qkv": (6144, 4096, [Share((128, 64), 4, 64, 7), Share((64, 32), 2, 64, 9), Share((32, 16), 1, 128, 6)]),
    "out": (4096, 4096, [Share((128,), 4, 64, 8), Share((64,), 2, 128, 6), Share((32,), 1, 128, 8)]),
    "gate_up": (
        28672,
        4096,
        [Share((128, 64, 32), 1, 64, 5), Share((128, 64, 32), 1, 64, 5, 8), Share((64, 32, 16), 1, 64, 4)],
    ),
    "down": (4096, 14336, [Share((128,), 4, 64, 8), Share((128,), 4, 64, 8, 8), Share((64,), 2, 128, 6)]),
}

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def measure(product: Product, x: torch.Tensor, weights: list[torch.Tensor]) -> float:
    """Microseconds of one product."""

    def run_all() -> None:
        for weight in weights:
            product(x, weight)

    return graph_median_us(run_all) / len(weights)


def by_shares(share: Share) -> Product:
    """The product by our kernel; parts are left to whoever reads them."""
    return lambda x, weight: multiply_shares(x, weight, share)


def measure_shape(name: str, ceiling: float) -> list[dict[str, Any]]:
    """Records of the library and of each share for one weight, and every number of tokens."""
    rows, width, shares = SHAPES[name]
    size = rows * width * 2
    count = -(-LAUNCHES_READ_BYTES // size)
    weights = [torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(count)]
    records = []
    for tokens in TOKENS:
        x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
        want = x.float() @ weights[0].float().T
        for share in (None, *shares):
            product = linear if share is None else by_shares(share)
            out = product(x, weights[0]).float()
            error = float(((out.sum(0) if out.dim() == 3 else out) - want).norm() / want.norm())
            us = measure(product, x, weights)
            record = {
                "weight": name,
                "rows": rows,
                "width": width,
                "tokens": tokens,
                "share": None if share is None else asdict(share),
                "us": round(us, 2),
                "share_of_read_bandwidth": round(size / us / 1e6 / ceiling, 3),
                "error": round(error, 5),
            }
            print(record, flush=True)
            records.append(record)
    return records


def choose(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The table of the shares that are clearly faster than the library."""
    table = []
    for name in SHAPES:
        for tokens, most in TOKENS.items():
            mine = [r for r in records if (r["weight"], r["tokens"]) == (name, tokens)]
            library = next(r["us"] for r in mine if r["share"] is None)
            right = [r for r in mine if r["share"] is not None and r["error"] < LARGEST_ERROR]
            right = [r for r in right if r["share"]["parts"] == 1 or name != "gate_up"]
            best = min(right, key=_full_us, default=None)
            if best is not None and _full_us(best) < CLEARLY_FASTER * library:
                table.append({key: best[key] for key in ("rows", "width", "share")} | {"most_tokens": most})
    return table


def _full_us(record: dict[str, Any]) -> float:
    return float(record["us"]) + (PARTS_US if record["share"]["parts"] > 1 else 0.0)


def main() -> None:
    """Measure, and write the records and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", type=Path, default=SHARES_FILE)
    options = parser.parse_args()
    ceiling = read_bandwidth()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    records = [record for name in SHAPES for record in measure_shape(name, ceiling)]
    stamped = [{**record, "card": torch.cuda.get_device_name(), "commit": commit} for record in records]
    options.out.write_text(json.dumps(stamped, indent=1) + "\n")
    table = choose(records)
    options.table.write_text(json.dumps(table, indent=1) + "\n")
    print(json.dumps({"read_tbps": round(ceiling, 3), "records": len(records), "table": table}))


if __name__ == "__main__":
    main()
