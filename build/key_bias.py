"""What a bias of k_proj does to the ranges that K is quantized in, and which format still resolves K under it.

RoPE turns a channel pair with bias (b1, b2) by an angle that grows with the position: in the cache it is a wave of
amplitude a = |(b1, b2)|. What a scale has to cover on top of K's own width W is

    a page's channel     2 a sin(min(63 theta, pi) / 2)         slow pairs hardly move; the zero point takes them
    a token              2 a                                    one scale for all channels: everybody pays
    a static channel     2 a sin(min(context theta, pi) / 2)

A format resolves K when its step, (W + that) / (2^bits - 1), is at most COARSEST_STEP times the step that int4 has
without a bias, W / 15. That looks at K alone and is strict, since models with such biases have a small Q there. In the
layers that it finds, `score_error` measures on real K and Q what keeping the bias in K costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from nibble.balance import BasisChange
from nibble.formats import FORMATS, PAGE_TOKENS, KVFormat, ScaleKind, TensorFormat
from nibble.quantizer import round_trip

COARSEST_STEP = 2.0  # at twice int4's step the error of the channels that are hit has four times its variance
USUAL_KEY_WIDTH = 8.0  # of a K channel within a page, where no calibration says better: 4 to 15 in Llama and Qwen
INT4_LEVELS = 15
REMEDIES = ("k8v4", "fp16")  # what a layer gets when its own format does not resolve K; int8's token scales would not


@dataclass(frozen=True)
class RopeSpan:
    """How far RoPE turns. theta: the base. context: tokens of the longest sequence."""

    theta: float
    context: int

    def wave(self, pairs: int, tokens: int) -> torch.Tensor:
        """Range of a unit wave over `tokens` positions, for each of a head's channel pairs."""
        speeds = self.theta ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
        return 2 * torch.sin((speeds * (tokens - 1)).clamp_max(math.pi) / 2)


def pair_amplitudes(bias: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[heads, head_dim / 2]: RoPE pairs channel c with c + head_dim / 2."""
    first, second = bias.double().view(-1, head_dim).chunk(2, -1)
    return torch.hypot(first, second)


def times_int4_step(amplitudes: torch.Tensor, fmt: TensorFormat, width: float, rope: RopeSpan) -> float:
    """The widest step of K in a format, in units of int4's step without a bias. width: of a K channel, unbiased."""
    if fmt.scale is ScaleKind.NONE:
        return 0.0
    pairs = amplitudes.shape[-1]
    if fmt.scale is ScaleKind.TOKEN:
        added = 2 * float(amplitudes.max())
    else:
        tokens = PAGE_TOKENS if fmt.scale is ScaleKind.PAGE_CHANNEL else rope.context
        added = float((amplitudes * rope.wave(pairs, tokens)).max())
    return (width + added) / fmt.levels / (width / INT4_LEVELS)


def score_error(
    pages: torch.Tensor, fmt: TensorFormat, reader: torch.Tensor, basis: BasisChange | None = None
) -> float:
    """What sealing these pages adds to scores, mean square over tokens and summed over heads.

    pages: K [heads, pages, 64, D], float32, as far as it is stored. reader: second moment of Q in each head, [heads, D,
    D]. basis: that K is stored in.
    """
    stored = pages if basis is None else torch.einsum("hptd,hed->hpte", pages, basis.forward)
    error = round_trip(stored.half(), fmt) - stored
    if basis is not None:
        error = torch.einsum("hpte,hed->hptd", error, basis.reader)
    squares = torch.einsum("hptd,hde,hpte->hpt", error.double(), reader.double(), error.double())
    return float(squares.mean((1, 2)).sum())


def find_remedy(amplitudes: torch.Tensor, fmt: KVFormat, width: float, rope: RopeSpan) -> KVFormat | None:
    """The first format of `REMEDIES` that resolves K; None when `fmt` itself does."""
    if times_int4_step(amplitudes, fmt.k, width, rope) <= COARSEST_STEP:
        return None
    for name in REMEDIES:
        if times_int4_step(amplitudes, FORMATS[name].k, width, rope) <= COARSEST_STEP:
            return FORMATS[name]
    return FORMATS["fp16"]
