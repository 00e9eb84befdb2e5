"""Cache memory of one running sequence, counted in the allocator while it runs.

The figure of the sealed pages alone flatters a quantized cache at short lengths: sinks, recent and open pages are fp16.
So both kinds of page are counted. An engine that has served nothing yet holds no page of anybody else.
"""

from __future__ import annotations

from eval.records import Footprint, Memory
from nibble.errors import NibbleError
from nibble.formats import PAGE_TOKENS
from nibble.runtime import Engine, EngineStats, SamplingParams, TokenEvent


def measure_memory(quantized: Engine, fp16: Engine, prompt: list[int]) -> Memory:
    """Both engines' footprints while they hold the prompt."""
    return Memory(quantized=measure_footprint(quantized, prompt), fp16=measure_footprint(fp16, prompt))


def measure_footprint(engine: Engine, prompt: list[int]) -> Footprint:
    """Run the prompt, read the pools when its first token is out, let it go. NibbleError when the run fails."""
    if engine.has_work:
        raise NibbleError("memory: got an engine with running requests, allowed an idle one")
    request_id = engine.submit(prompt, SamplingParams(max_tokens=2, ignore_eos=True))
    events: list[TokenEvent] = []
    while not events:
        events = engine.step()
    if events[0].error:
        raise NibbleError(f"memory: the measured sequence failed: {events[0].error}")
    stats = engine.stats()
    engine.cancel(request_id)
    while engine.has_work:
        engine.step()
    return _footprint(stats, len(prompt))


def _footprint(stats: EngineStats, tokens: int) -> Footprint:
    return Footprint(
        tokens=tokens,
        sealed_bytes_per_token=stats.bytes_per_token,
        sealed_bytes=round(stats.pages_used * PAGE_TOKENS * stats.bytes_per_token),
        open_bytes=round(stats.open_pages_used * PAGE_TOKENS * stats.bytes_per_token_fp16),
    )
