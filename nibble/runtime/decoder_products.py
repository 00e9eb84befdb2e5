"""The matrix products of a decoder: the library's, and for few tokens our own where it reads the weight faster.

A product of few tokens is bound by reading its weight. The library cuts a weight into tiles that rarely come out even
over the multiprocessors; ours gives each multiprocessor one share, if need be a part of the sum, and leaves the parts
to whoever reads the product. The choice depends on shapes alone, so a captured graph and single launches agree.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear


def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [tokens, k] times weight [n, k]: [tokens, n]."""
    return multiply_in_parts(x, weight, most_parts=1)


def multiply_in_parts(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, most_parts: int = 16
) -> torch.Tensor:
    """The same, or fp32 [parts, tokens, n] that add up to it."""
    if bias is None and x.is_cuda:
        from nibble.runtime.linear_kernels import choose_share, multiply_shares

        share = choose_share(x, weight)
        if share is not None and share.parts <= most_parts:
            return multiply_shares(x, weight, share)
    return linear(x, weight, bias)
