"""The native runtime: transformers' models over a paged, quantized KV cache, with continuous batching."""

from nibble.runtime.engine import Engine
from nibble.runtime.request import (
    Completion,
    EngineLimits,
    EngineStats,
    FinishReason,
    QueueFullError,
    SamplingParams,
    TokenEvent,
)

__all__ = [
    "Completion",
    "Engine",
    "EngineLimits",
    "EngineStats",
    "FinishReason",
    "QueueFullError",
    "SamplingParams",
    "TokenEvent",
]
