"""The matrix products of a decoder: the library's, and for few tokens our own where it reads the weight faster.

Weights are in 16 bits, or in e4m3 (`nibble.runtime.fp8_rows`); then the tokens are quantized too, each by itself.

A product of few tokens is bound by reading its weight. The library cuts a weight into tiles that rarely come out even
over the multiprocessors; ours gives each multiprocessor one share, if need be a part of the sum, and leaves the parts
to whoever reads the product. Which is faster was measured (`bench/linear.py` writes shares.json); the choice depends on
shapes alone, so a captured graph and single launches agree.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from nibble.runtime.decoder_ops import SILU, gate
from nibble.runtime.fp8_rows import Fp8Rows, quantize_rows

SHARES_FILE = Path(__file__).with_name("shares.json")
Matrix = torch.Tensor | Fp8Rows
HOPPER = (9, 0)  # the card that the shares were measured on, and whose shared memory they fill


@dataclass(frozen=True)
class Share:
    """rows: of the weight, as powers of two; parts of k; depth: of a step over k; stages in flight; warps.

    weight_first: the weight is the tensor cores' first operand. least_tokens: that tokens are padded to.
    """

    rows: tuple[int, ...]
    parts: int
    depth: int
    stages: int
    warps: int = 4
    weight_first: bool = False
    least_tokens: int = 16


def multiply(x: torch.Tensor, weight: Matrix) -> torch.Tensor:
    """x [tokens, k] times weight [n, k]: [tokens, n]."""
    return multiply_in_parts(x, weight, most_parts=1)


def multiply_gated(x: torch.Tensor, gate_up: Matrix, activation: str = SILU) -> torch.Tensor:
    """activation(gate) * up of the products with the two halves of a weight [2 n, k]: [tokens, n]."""
    share = choose_share(x, gate_up)
    if share is None or share.parts > 1:
        return gate(multiply_by_library(x, gate_up), activation)
    return _multiply_shares(x, gate_up, share, gated=True, activation=activation)


def multiply_in_parts(
    x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None, *, most_parts: int = 16
) -> torch.Tensor:
    """`multiply`, or fp32 [parts, tokens, n] that add up to it."""
    share = None if bias is not None else choose_share(x, weight)
    if share is None or share.parts > most_parts:
        return multiply_by_library(x, weight, bias)
    return _multiply_shares(x, weight, share)


def multiply_by_library(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`multiply` plus a bias [n]; on a CPU an e4m3 weight is multiplied as fp32."""
    if isinstance(weight, torch.Tensor):
        return linear(x, weight, bias)
    rows = quantize_rows(x)
    if not x.is_cuda:
        return linear(rows.dequantized(), weight.dequantized(), bias).to(x.dtype)
    scales = {"scale_a": rows.scales[:, None], "scale_b": weight.scales[None, :]}
    return torch._scaled_mm(rows.values, weight.values.T, **scales, bias=bias, out_dtype=x.dtype, use_fast_accum=True)


def _multiply_shares(x: torch.Tensor, weight: Matrix, share: Share, **gating: Any) -> torch.Tensor:
    from nibble.runtime.linear_kernels import multiply_shares

    return multiply_shares(quantize_rows(x) if isinstance(weight, Fp8Rows) else x, weight, share, x.dtype, **gating)


def choose_share(x: torch.Tensor, weight: Matrix) -> Share | None:
    """The share that was measured to be faster than the library for these shapes; None where the library is."""
    if x.dtype is not torch.bfloat16 or not _is_hopper(x.device):
        return None
    kind = "e4m3" if isinstance(weight, Fp8Rows) else "bf16"
    return next((share for most, share in shares_of(*weight.shape, kind) if x.shape[0] <= most), None)


@lru_cache
def shares_of(rows: int, width: int, kind: str = "bf16") -> list[tuple[int, Share | None]]:
    """(most tokens, share) of a weight, fewest tokens first; None where the library is as fast."""
    entries = [entry for entry in read_table() if (entry["rows"], entry["width"], entry["kind"]) == (rows, width, kind)]
    ordered = sorted(entries, key=lambda entry: int(entry["most_tokens"]))
    return [(entry["most_tokens"], _share_of(entry["share"])) for entry in ordered]


def _share_of(values: dict[str, Any] | None) -> Share | None:
    return values and Share(**{**values, "rows": tuple(values["rows"])})  # type: ignore[return-value]


def read_table() -> list[dict[str, Any]]:
    """What bench/linear.py wrote; nothing when it is not there: then the library does it all."""
    table: list[dict[str, Any]] = json.loads(SHARES_FILE.read_text()) if SHARES_FILE.is_file() else []
    return table


@lru_cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER
