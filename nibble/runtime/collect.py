"""Runs an engine until a set of prompts is answered, and gathers each one's tokens into a completion."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nibble.runtime.request import Completion, SamplingParams, TokenEvent

if TYPE_CHECKING:
    from nibble.runtime.engine import Engine


def collect_completions(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[Completion]:
    """One completion for each prompt, in their order. Events of other requests are dropped."""
    start = time.monotonic()
    ids = [engine.submit(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    events: dict[str, list[tuple[float, TokenEvent]]] = {request_id: [] for request_id in ids}
    unfinished = set(ids)
    while unfinished:
        for event in engine.step():
            if event.request_id in unfinished:
                events[event.request_id].append((time.monotonic() - start, event))
                if event.finish_reason is not None:
                    unfinished.remove(event.request_id)
    return [_completion(events[request_id]) for request_id in ids]


def _completion(timed_events: list[tuple[float, TokenEvent]]) -> Completion:
    events = [event for _, event in timed_events]
    tokens = [event for event in events if event.token_id is not None]
    last = events[-1]
    assert last.finish_reason is not None
    return Completion(
        token_ids=[event.token_id for event in tokens if event.token_id is not None],
        text="".join(event.text for event in events),
        finish_reason=last.finish_reason,
        prompt_tokens=last.prompt_tokens,
        cached_tokens=last.cached_tokens,
        logprobs=[event.logprob for event in tokens if event.logprob is not None],
        top_logprobs=[event.top_logprobs or {} for event in tokens],
        ttft_s=timed_events[0][0],
        duration_s=timed_events[-1][0],
    )
