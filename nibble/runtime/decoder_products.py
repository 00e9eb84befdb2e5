"""The matrix products of a decoder: the library's, and for few tokens our own where it reads the weight faster.

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

SHARES_FILE = Path(__file__).with_name("shares.json")
HOPPER = (9, 0)  # the card that the shares were measured on, and whose shared memory they fill


@dataclass(frozen=True)
class Share:
    """rows: of the weight, as powers of two; parts of k; depth: of a step over k; stages in flight; warps."""

    rows: tuple[int, ...]
    parts: int
    depth: int
    stages: int
    warps: int = 4


def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [tokens, k] times weight [n, k]: [tokens, n]."""
    return multiply_in_parts(x, weight, most_parts=1)


def multiply_in_parts(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, most_parts: int = 16
) -> torch.Tensor:
    """The same, or fp32 [parts, tokens, n] that add up to it."""
    share = None if bias is not None else choose_share(x, weight)
    if share is None or share.parts > most_parts:
        return linear(x, weight, bias)
    from nibble.runtime.linear_kernels import multiply_shares

    return multiply_shares(x, weight, share)


def choose_share(x: torch.Tensor, weight: torch.Tensor) -> Share | None:
    """The share that was measured to be faster than the library for these shapes; None where the library is."""
    if x.dtype is not torch.bfloat16 or not _is_hopper(x.device):
        return None
    return next((share for most, share in shares_of(*weight.shape) if x.shape[0] <= most), None)


@lru_cache
def shares_of(rows: int, width: int) -> list[tuple[int, Share]]:
    """(most tokens, share) of a weight, fewest tokens first."""
    entries = [entry for entry in read_table() if (entry["rows"], entry["width"]) == (rows, width)]
    ordered = sorted(entries, key=lambda entry: int(entry["most_tokens"]))
    return [(e["most_tokens"], Share(**{**e["share"], "rows": tuple(e["share"]["rows"])})) for e in ordered]


def read_table() -> list[dict[str, Any]]:
    """What bench/linear.py wrote; nothing when it is not there: then the library does it all."""
    table: list[dict[str, Any]] = json.loads(SHARES_FILE.read_text()) if SHARES_FILE.is_file() else []
    return table


@lru_cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER
