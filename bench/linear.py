"""Matrix products of a decode step: how much of the plain reading bandwidth they reach, by the library and by shares.

    python -m bench.linear --tokens 1 16 64      # into bench/results/linear.json

A graph runs one product over several weights, so that nothing is in L2. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import linear

from bench.attention import graph_median_us, read_bandwidth
from nibble.runtime.linear_kernels import Share, multiply_shares

RESULTS = Path(__file__).parent / "results" / "linear.json"
LAUNCHES_READ_BYTES = 600_000_000  # of one graph, at least
SHAPES = {  # llama-8b: rows and columns of the weight, and the shares that come out even on 132 multiprocessors
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


def main() -> None:
    """Measure what the options name and write the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    ceiling = read_bandwidth()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    records = []
    for name, (rows, width, shares) in SHAPES.items():
        size = rows * width * 2
        weights = [
            torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) * 0.02
            for _ in range(-(-LAUNCHES_READ_BYTES // size))
        ]
        for tokens in options.tokens:
            x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
            want = x.float() @ weights[0].float().T
            for product, label in ((linear, "library"), *((by_shares(share), str(share)) for share in shares)):
                out = product(x, weights[0]).float()
                error = ((out.sum(0) if out.dim() == 3 else out) - want).norm() / want.norm()
                us = measure(product, x, weights)
                share_of_read = size / us / 1e6 / ceiling
                record = {"weight": name, "tokens": tokens, "product": label, "us": round(us, 2)}
                record |= {"share_of_read_bandwidth": round(share_of_read, 3), "error": round(float(error), 5)}
                records.append({**record, "card": torch.cuda.get_device_name(), "commit": commit})
                print(record, flush=True)
    options.out.write_text(json.dumps(records, indent=1) + "\n")
    print(json.dumps({"read_tbps": round(ceiling, 3), "records": len(records), "results": str(options.out)}))


if __name__ == "__main__":
    main()
