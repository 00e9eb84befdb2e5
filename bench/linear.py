"""Matrix products of a decode step: how much of the plain reading bandwidth they reach, by the library and by shares.

    python -m bench.linear                      # into bench/results/linear.json and nibble/runtime/shares.json
    python -m bench.linear --model llama-70b    # records and table of one model; those of the other stay

A graph runs one product over several weights, so that nothing is in L2. The product of gate and up counts with the
gate, one of e4m3 with the quantizing of its input. The shares that beat the library clearly become the table that the
runtime reads. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.attention_cache import graph_median_us, read_bandwidth
from bench.measured_commit import measured_commit
from nibble.runtime.decoder_ops import gate
from nibble.runtime.decoder_products import SHARES_FILE, Share, multiply_by_library, read_table
from nibble.runtime.fp8_rows import Fp8Rows, quantize_rows
from nibble.runtime.linear_kernels import multiply_shares

RESULTS = Path(__file__).parent / "results" / "linear.json"
LAUNCHES_READ_BYTES = 600_000_000  # of one graph, at least
TOKENS = {1: 16, 24: 32, 64: 64}  # measured at -> good up to: tokens are padded to 16, 32 and 64
CLEARLY_FASTER = 0.97
PARTS_US = 1.0  # what adding parts up costs whoever reads them
LARGEST_ERROR = {"bf16": 5e-3, "e4m3": 5e-2}  # relative, beside the product in fp32 of what was to be multiplied
COMPILERS = 12  # processes: a kernel takes a second or two

Matrix = torch.Tensor | Fp8Rows


@dataclass(frozen=True)
class Case:
    """A weight of a model. shares: that come out even on 132 multiprocessors."""

    model: str
    weight: str
    kind: str  # bf16 or e4m3
    rows: int
    width: int
    shares: tuple[Share, ...]

    @property
    def is_gated(self) -> bool:
        return self.weight == "gate_up"

    def random_weight(self) -> Matrix:
        matrix = torch.randn(self.rows, self.width, device="cuda", dtype=torch.bfloat16) * 0.02
        return matrix if self.kind == "bf16" else quantize_rows(matrix)


def _shares(*each: tuple[Any, ...]) -> tuple[Share, ...]:
    return tuple(Share(*values) for values in each)


CASES = [
    Case("llama-8b", "qkv", "bf16", 6144, 4096, _shares(
        ((64, 32), 2, 64, 9), ((64, 32), 2, 64, 9, 4, False, 64), ((128, 64), 4, 128, 3), ((32, 16), 1, 128, 6))),
    Case("llama-8b", "out", "bf16", 4096, 4096, _shares(
        ((64,), 2, 128, 6), ((64,), 2, 128, 6, 4, True), ((128,), 4, 128, 4, 4, True), ((32,), 1, 128, 8))),
    Case("llama-8b", "gate_up", "bf16", 28672, 4096, _shares(
        ((128, 64, 32), 1, 64, 5), ((128, 64, 32), 1, 128, 3), ((128, 64, 32), 1, 128, 3, 4, False, 64))),
    Case("llama-8b", "down", "bf16", 4096, 14336, _shares(
        ((64,), 2, 128, 6), ((64,), 2, 128, 6, 4, True), ((128,), 4, 128, 4), ((128,), 4, 128, 4, 4, True))),
    Case("llama-8b", "qkv", "e4m3", 6144, 4096, _shares(
        ((64, 32), 2, 128, 8), ((64, 32), 2, 128, 8, 4, False, 64))),
    Case("llama-8b", "out", "e4m3", 4096, 4096, _shares(((64,), 2, 128, 8, 4, True))),
    Case("llama-8b", "gate_up", "e4m3", 28672, 4096, _shares(
        ((128, 64, 32), 1, 256, 3), ((128, 64, 32), 1, 256, 3, 4, False, 64))),
    Case("llama-8b", "down", "e4m3", 4096, 14336, _shares(((64,), 2, 128, 8, 4, True))),
    Case("llama-70b", "qkv", "e4m3", 10240, 8192, _shares(
        ((128, 32), 2, 128, 7), ((64, 16), 1, 128, 9, 4, False, 64))),
    Case("llama-70b", "out", "e4m3", 8192, 8192, _shares(
        ((64,), 1, 128, 8, 4, True), ((64,), 1, 256, 6, 4, False, 64))),
    Case("llama-70b", "gate_up", "e4m3", 57344, 8192, _shares(
        ((128, 64, 32), 1, 256, 3), ((128, 64, 32), 1, 256, 3, 4, False, 64), ((128,), 1, 256, 4, 4, True))),
    Case("llama-70b", "down", "e4m3", 8192, 28672, _shares(
        ((64,), 1, 128, 8, 4, True), ((64,), 1, 256, 6, 4, False, 64))),
]  # fmt: skip

Product = Callable[[torch.Tensor, Matrix], torch.Tensor]


def products(case: Case) -> Iterator[tuple[Share | None, Product]]:
    """The library's and those of the shares."""

    def by_library(x: torch.Tensor, weight: Matrix) -> torch.Tensor:
        out = multiply_by_library(x, weight)
        return gate(out) if case.is_gated else out

    def by_shares(share: Share) -> Product:
        return lambda x, weight: multiply_shares(
            quantize_rows(x) if isinstance(weight, Fp8Rows) else x, weight, share, x.dtype, gated=case.is_gated
        )

    yield None, by_library
    for share in case.shares:
        yield share, by_shares(share)


def compile_case(index: int) -> None:
    """Run each product of a case once, so that its kernels are in Triton's cache."""
    case = CASES[index]
    weight = case.random_weight()
    for tokens in TOKENS:
        x = torch.randn(tokens, case.width, device="cuda", dtype=torch.bfloat16)
        for _, product in products(case):
            product(x, weight)
    torch.cuda.synchronize()


def compile_all(cases: list[int]) -> None:
    """Fill Triton's cache, many cases at once."""
    workers = min(COMPILERS, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as compilers:
        list(compilers.map(compile_case, cases))


def measure(product: Product, x: torch.Tensor, weights: list[Matrix]) -> float:
    """Microseconds of one product."""

    def run_all() -> None:
        for weight in weights:
            product(x, weight)

    return graph_median_us(run_all) / len(weights)


def wanted(x: torch.Tensor, weight: Matrix, is_gated: bool) -> torch.Tensor:
    """The product in fp32 over what the weight stands for."""
    out = x.float() @ (weight.dequantized() if isinstance(weight, Fp8Rows) else weight.float()).T
    return gate(out) if is_gated else out


def measure_case(case: Case, ceiling: float) -> Iterator[dict[str, Any]]:
    """Records of each product for every number of tokens. ceiling: TB/s of plain reading."""
    first = case.random_weight()
    size = first.num_bytes if isinstance(first, Fp8Rows) else first.numel() * 2
    weights = [first, *(case.random_weight() for _ in range(-(-LAUNCHES_READ_BYTES // size) - 1))]
    for tokens in TOKENS:
        x = torch.randn(tokens, case.width, device="cuda", dtype=torch.bfloat16)
        want = wanted(x, first, case.is_gated)
        for share, product in products(case):
            out, us = product(x, first).float(), measure(product, x, weights)
            error = float(((out.sum(0) if out.dim() == 3 else out) - want).norm() / want.norm())
            record = {
                "model": case.model, "weight": case.weight, "kind": case.kind,
                "rows": case.rows, "width": case.width, "tokens": tokens,
                "share": None if share is None else asdict(share), "us": round(us, 2),
                "share_of_read_bandwidth": round(size / us / 1e6 / ceiling, 3), "error": round(error, 5),
            }  # fmt: skip
            shown = (
                "library"
                if share is None
                else (*share.rows, share.parts, share.depth, share.stages, share.least_tokens)
            )
            first_operand = "weight first" if share is not None and share.weight_first else ""
            print(case.model, case.weight, case.kind, tokens, shown, first_operand,
                  *(record[key] for key in ("us", "share_of_read_bandwidth", "error")), flush=True)  # fmt: skip
            yield record


def choose(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The share of each weight and number of tokens that is clearly faster than the library; None where none is."""
    table = []
    for case in CASES:
        for tokens, most in TOKENS.items():
            mine = [
                r for r in records if all(r[key] == getattr(case, key) for key in ("model", "weight", "kind"))
                if r["tokens"] == tokens
            ]  # fmt: skip
            if not mine:
                continue
            library = next(r["us"] for r in mine if r["share"] is None)
            right = [r for r in mine if r["share"] is not None and r["error"] < LARGEST_ERROR[case.kind]]
            best = min(right, key=_full_us, default=None)
            is_faster = best is not None and _full_us(best) < CLEARLY_FASTER * library
            entry = {key: mine[0][key] for key in ("model", "weight", "kind", "rows", "width")}
            table.append(entry | {"most_tokens": most, "share": best["share"] if best and is_faster else None})
    return table


def _full_us(record: dict[str, Any]) -> float:
    return float(record["us"]) + (PARTS_US if record["share"]["parts"] > 1 else 0.0)


def main() -> None:
    """Measure, and write the records and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", default=["llama-8b", "llama-70b"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", type=Path, default=SHARES_FILE)
    options = parser.parse_args()
    chosen = [index for index, case in enumerate(CASES) if case.model in options.model]
    compile_all(chosen)
    ceiling = read_bandwidth()
    old = json.loads(options.out.read_text()) if options.out.is_file() else []
    records = [record for record in old if record.get("model") not in (None, *options.model)]
    stamp = {"card": torch.cuda.get_device_name(), "commit": measured_commit()}
    for index in chosen:
        records += [{**record, **stamp} for record in measure_case(CASES[index], ceiling)]
        options.out.write_text(json.dumps(records, indent=1) + "\n")
    table = [entry for entry in read_table() if entry["model"] not in options.model]
    table += [entry for entry in choose(records) if entry["model"] in options.model]
    options.table.write_text(json.dumps(table, indent=1) + "\n")
    print(json.dumps({"read_tbps": round(ceiling, 3), "records": len(records), "shares": len(table)}))


if __name__ == "__main__":
    main()
