"""The vocabulary of the runtime: what a caller asks for, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from nibble.errors import NibbleError

MAX_LOGPROBS = 20
DEVICES = ("auto", "cpu", "cuda")
CPU_CHUNK_TOKENS = 256
GPU_CHUNK_TOKENS = 2048  # fewer leave a GPU's products short of rows


class QueueFullError(NibbleError):
    """The waiting queue is at its limit; ask again later."""


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence token or a stop string
    LENGTH = "length"  # max_tokens or the context is used up
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class EngineLimits:
    """How much an engine takes on at once.

    max_context: tokens of prompt and answer together. chunk_tokens: the most tokens of one forward pass; None leaves it
    to the device. pool_mb: MiB for the whole KV cache; None sizes it so that `max_running` sequences of `max_context`
    tokens fit. threads: CPU threads for torch; None leaves torch's own choice. device: "cpu", "cuda", or "auto" for a
    GPU that the kernels know when there is one.
    """

    max_context: int = 2048
    max_running: int = 16
    chunk_tokens: int | None = None
    max_waiting: int = 256
    pool_mb: int | None = None
    threads: int | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        bounds = {"max_context": 2, "max_running": 1, "chunk_tokens": 16, "max_waiting": 1}
        for name, lowest in bounds.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise NibbleError(f"{name}: got {value}, allowed {lowest} or more")
        if self.device not in DEVICES:
            raise NibbleError(f"device: got {self.device!r}, allowed {', '.join(DEVICES)}")
        if self.step_tokens < self.max_running:
            raise NibbleError(
                f"chunk_tokens: got {self.chunk_tokens}, allowed max_running ({self.max_running}) or more, since every "
                "running sequence decodes one token a step"
            )

    @property
    def step_tokens(self) -> int:
        """The most tokens of one forward pass: `chunk_tokens`, or what suits a CPU."""
        return self.chunk_tokens or max(CPU_CHUNK_TOKENS, self.max_running)

    def for_gpu(self) -> EngineLimits:
        """The same, with a GPU's chunk where none was given."""
        return self if self.chunk_tokens else replace(self, chunk_tokens=max(GPU_CHUNK_TOKENS, self.max_running))


@dataclass(frozen=True)
class SamplingParams:
    """How to pick tokens. temperature 0 is greedy; top_k 0 and top_p 1 are off; seed None draws a fresh one.

    stop: the answer ends before the first of these strings. logprobs: how many alternatives to report for each token.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        checks = (
            ("max_tokens", self.max_tokens >= 1, "1 or more"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "0 (greedy) to 100"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0, up to 1 (off)"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "0 to 2^63 - 1"),
            ("stop", all(self.stop) and len(self.stop) <= 16, "up to 16 strings, none empty"),
            ("logprobs", 0 <= self.logprobs <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"),
        )
        for name, valid, allowed in checks:
            if not valid:
                raise NibbleError(f"{name}: got {getattr(self, name)!r}, allowed {allowed}")


class TokenEvent(NamedTuple):
    """One token of one request, or its end.

    text: what became certain with this token: whole characters, nothing that may turn out to be a stop string.
    logprob: natural logarithm of the token's probability under the model. cached_tokens: prompt tokens that came from
    the prefix cache.
    """

    request_id: str
    token_id: int | None
    text: str
    logprob: float | None = None
    top_logprobs: dict[int, float] | None = None
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Completion:
    """A whole answer. ttft_s: seconds from submission to the first token. logprobs: one for each token."""

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    logprobs: list[float]
    top_logprobs: list[dict[int, float]]
    ttft_s: float
    duration_s: float


@dataclass(frozen=True)
class EngineStats:
    """Gauges (pages, sequences, bytes, layers by format) and counters (tokens, hits, preemptions)."""

    pages_free: int
    pages_used: int
    open_pages_free: int
    open_pages_used: int
    running: int
    waiting: int
    prefix_hit_tokens: int
    preemptions: int
    prompt_tokens: int
    tokens_generated: int
    bytes_per_token: float
    bytes_per_token_fp16: float
    pool_bytes: int
    layers_by_format: dict[str, int] = field(default_factory=dict)
