"""Tokens per second of both engines, taken in turn in one process, so that a slow minute hits both.

Prompts are random token ids, new each time: no prefix is ever reused, and a prompt's meaning does not change its cost.
Decoding is timed from the first generated token on; reading the prompt is timed apart. Many streams are timed only
while all of them decode: from the last stream's first token to the first stream's last.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import numpy as np

from eval.config import SpeedPlan
from eval.records import EngineSpeed, Latency, Speed
from nibble.errors import NibbleError
from nibble.runtime import Engine, SamplingParams

WARM_UP_TOKENS = 4


@dataclass
class StreamTimes:
    """When each token of each stream arrived, in seconds after all prompts were submitted."""

    prompt_tokens: int
    arrivals: dict[str, list[float]] = field(default_factory=dict)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens of the whole batch over the time until every stream had its first token."""
        return self.prompt_tokens * len(self.arrivals) / self._all_started

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens of all streams together over the time in which all of them were decoding."""
        start, end = self._all_together
        if not self.waits:
            raise NibbleError(
                "speed plan: the first stream ended before the last one began; allowed more decode_tokens, "
                "fewer streams or a shorter prompt"
            )
        return len(self.waits) / (end - start)

    @property
    def waits(self) -> list[float]:
        """Seconds from a token of a stream to its next, while all of them were decoding."""
        start, end = self._all_together
        pairs = [pair for times in self.arrivals.values() for pair in pairwise(times)]
        return [after - before for before, after in pairs if start < after <= end]

    @property
    def _all_together(self) -> tuple[float, float]:
        return self._all_started, min(times[-1] for times in self.arrivals.values())

    @property
    def _all_started(self) -> float:
        return max(times[0] for times in self.arrivals.values())


def measure_speed(quantized: Engine, fp16: Engine, plan: SpeedPlan, seed: int) -> Speed:
    """Time 1, 2, 4, ... `plan.streams` streams at once on both engines in turn, `plan.repeats` times."""
    engines = {"quantized": quantized, "fp16": fp16}
    times: dict[str, dict[int, list[StreamTimes]]] = {
        name: {count: [] for count in stream_counts(plan.streams)} for name in engines
    }
    prompts = random_prompts(len(quantized.tokenizer), plan.prompt_tokens, seed + 1)  # seed itself: memory's prompt
    for engine in engines.values():
        time_streams(engine, [next(prompts)], WARM_UP_TOKENS)
    for _ in range(plan.repeats):
        for count in stream_counts(plan.streams):
            batch = [next(prompts) for _ in range(count)]
            for name, engine in engines.items():
                tokens = plan.tokens_written(count, engine.limits.step_tokens)
                times[name][count].append(time_streams(engine, batch, tokens))
    speeds = {name: _summarise(taken) for name, taken in times.items()}
    return Speed(quantized=speeds["quantized"], fp16=speeds["fp16"], streams=plan.streams, repeats=plan.repeats)


def stream_counts(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]


def time_streams(engine: Engine, prompts: list[list[int]], decode_tokens: int) -> StreamTimes:
    """Generate exactly `decode_tokens` for every prompt at once; returns when each token arrived."""
    times = StreamTimes(prompt_tokens=len(prompts[0]))
    params = SamplingParams(max_tokens=decode_tokens, ignore_eos=True)
    start = time.perf_counter()
    for prompt in prompts:
        times.arrivals[engine.submit(prompt, params)] = []
    while engine.has_work:
        events = engine.step()
        now = time.perf_counter() - start
        for event in events:
            if event.error:
                raise NibbleError(f"speed: a timed stream failed: {event.error}")
            if event.token_id is not None:
                times.arrivals[event.request_id].append(now)
    return times


def random_prompt(vocab_size: int, prompt_tokens: int, seed: int) -> list[int]:
    """One prompt of random token ids."""
    return next(random_prompts(vocab_size, prompt_tokens, seed))


def random_prompts(vocab_size: int, prompt_tokens: int, seed: int) -> Iterator[list[int]]:
    """An endless row of prompts of random token ids; the same seed gives the same row."""
    generator = random.Random(seed)
    while True:
        yield [generator.randrange(vocab_size) for _ in range(prompt_tokens)]


def _summarise(times: dict[int, list[StreamTimes]]) -> EngineSpeed:
    """Medians over the repeats; times: by number of streams, from one to the most."""
    rates = {count: median(t.decode_tokens_per_s for t in taken) for count, taken in times.items()}
    return EngineSpeed(
        prefill_tokens_per_s=median(t.prefill_tokens_per_s for t in times[1]),
        decode_tokens_per_s=rates[1],
        decode_tokens_per_s_streams=rates[max(rates)],
        latencies=[_latency(count, rates[count], taken) for count, taken in times.items()],
    )


def _latency(streams: int, rate: float, taken: list[StreamTimes]) -> Latency:
    waits = [1000.0 * wait for times in taken for wait in times.waits]
    return Latency(
        streams=streams,
        decode_tokens_per_s=rate,
        ms_p50=float(np.quantile(waits, 0.5)),
        ms_p99=float(np.quantile(waits, 0.99)),
        tokens=len(waits),
    )
