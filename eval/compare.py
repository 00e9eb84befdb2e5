"""Read a window with both engines at once, a chunk of logits at a time, and measure every position.

Logits are too big to keep (a window of 2,048 tokens and 150,000 words is over a gigabyte for each engine), so the two
streams run in lockstep: a chunk of one beside the same positions of the other, reduced to four numbers a position and
dropped. Both streams come from `Engine.logits`, which answers through the cache, chunk by chunk: a single pass that
attends to raw K and V would measure nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from eval.measures import PositionMeasures, measure_positions, require_finite
from eval.windows import Window
from nibble.errors import NibbleError


class LogitsSource(Protocol):
    """What the comparison needs of an engine."""

    def logits(self, token_ids: list[int]) -> Iterator[torch.Tensor]:
        """float32 [chunk, vocab] for consecutive positions, all of them in the end."""


def compare_window(
    fp16: LogitsSource,
    quantized: LogitsSource,
    window: Window,
    index: int,
    advance: Callable[[int], None] = lambda positions: None,
) -> PositionMeasures:
    """Measure every position of a window; `advance` is told how many positions were done.

    index: the window's place in the run, for messages. NibbleError on NaN, on too few or too many logits.
    """
    next_tokens = torch.tensor(window.next_tokens)
    parts: list[PositionMeasures] = []
    done = 0
    for reference, candidate in _lockstep(fp16.logits(window.inputs), quantized.logits(window.inputs)):
        require_finite(reference, engine="fp16", window=index, first_position=done)
        require_finite(candidate, engine="quantized", window=index, first_position=done)
        parts.append(measure_positions(reference, candidate, next_tokens[done : done + len(reference)]))
        done += len(reference)
        advance(len(reference))
    if done != len(next_tokens):
        raise NibbleError(
            f"logits of window {index}: got {done} positions, allowed exactly {len(next_tokens)}; "
            "an engine left some out"
        )
    return PositionMeasures.concatenate(parts)


def _lockstep(
    first: Iterator[torch.Tensor], second: Iterator[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pair the rows of two streams whose chunks may differ in size; ends with the shorter stream."""
    left, right = next(first, None), next(second, None)
    while left is not None and right is not None:
        rows = min(len(left), len(right))
        yield left[:rows], right[:rows]
        left = left[rows:] if rows < len(left) else next(first, None)
        right = right[rows:] if rows < len(right) else next(second, None)
