"""The seam between the engine and what runs its steps: transformers on a CPU, our own decoder on a GPU."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Protocol

import torch

from nibble.runtime.cache import PoolSizes
from nibble.runtime.sampler import Sampled
from nibble.runtime.sequence import Sequence
from nibble.runtime.step import Span, Step


class PendingTokens(Protocol):
    """Tokens that were picked, but may not have come to the host yet."""

    @property
    def sequences(self) -> Rows[Sequence]: ...

    def wait(self) -> None:
        """Until the device has sent them; leaves the interpreter to other threads."""

    def read(self) -> list[Sampled]:
        """One for each of `sequences`; call `wait` first."""


class Runner(Protocol):
    """Runs steps in the order in which they are launched.

    overlaps: the engine may launch a step before it has read the tokens of the one before. pool_sizes: of the cache.
    """

    device: torch.device
    overlaps: bool
    vocabulary: int
    pool_sizes: PoolSizes

    def launch(self, step: Step, asked: Rows[Span]) -> PendingTokens:
        """Start a step and pick a token behind each of the `asked` spans. Page tables are read before it returns."""

    def logits(self, step: Step, rows: torch.Tensor) -> torch.Tensor:
        """Run a step; float32 [rows, vocabulary] of the given rows of its tokens, on the CPU."""

    def close(self) -> None:
        """Let go of what must be gone before the processes of an engine part; no step runs after it."""
