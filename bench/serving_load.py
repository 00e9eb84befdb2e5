"""Requests in time, for the serving bench: clients that ask again as soon as they are answered, and a long prompt that
comes into a running batch.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from bench.serving_engine import cancel_all, make_engine, prime
from bench.serving_records import Bench, Record, percentile
from nibble.runtime import Engine, EngineLimits, SamplingParams

ENDLESS = SamplingParams(max_tokens=1 << 20, ignore_eos=True)


@dataclass(frozen=True)
class Load:
    """A closed loop: each of `clients` sends `rounds` prompts, the next when the last is answered.

    pool_mb: of the cache; None for all there is room for.
    """

    prompt: int
    output: int
    clients: int
    rounds: int
    pool_mb: int | None = None


EQUAL_BATCH = [Load(1024, 1024, 16, 1), Load(1024, 1024, 64, 1), Load(8192, 1024, 16, 1), Load(32768, 512, 4, 1)]
EQUAL_MEMORY = [Load(8192, 256, 24, 1, pool_mb=8192)]  # room for seven fp16 requests
WARM_UPS = [Load(3001, 16, 5, 2), Load(1024, 16, 5, 1)]  # chunks of all kinds of lengths, for which kernels differ
RUNNING, RUNNING_CONTEXT, LONG_PROMPT = 32, 8192, 16384  # of the long prompt
CHUNKS = (2048, 512)


def measure_sweep(bench: Bench, kv: str) -> Iterator[Record]:
    """Closed loops over one engine with room for all of them."""
    context = max(load.prompt + load.output for load in EQUAL_BATCH) + 64
    most = max(load.clients for load in EQUAL_BATCH)
    engine = make_engine(bench.weights, kv, EngineLimits(max_context=context, max_running=most, chunk_tokens=2048))
    warm_up(engine)
    for load in EQUAL_BATCH:
        yield bench.record("sweep", engine, **run_clients(engine, load))


def measure_equal_memory(bench: Bench, kv: str) -> Iterator[Record]:
    """Closed loops of more clients than fit into a cache of one size for all formats."""
    for load in EQUAL_MEMORY:
        limits = EngineLimits(
            max_context=load.prompt + load.output + 64,
            max_running=load.clients,
            chunk_tokens=2048,
            pool_mb=load.pool_mb,
        )
        engine = make_engine(bench.weights, kv, limits)
        warm_up(engine)
        yield bench.record("memory", engine, **run_clients(engine, load))
        del engine
        free_memory()


def warm_up(engine: Engine) -> None:
    """Compile what prompts need."""
    for load in WARM_UPS:
        run_clients(engine, load)


def run_clients(engine: Engine, load: Load) -> dict[str, float | int | None]:
    """Time every token of every request."""
    generator = torch.Generator().manual_seed(load.clients)
    params = SamplingParams(max_tokens=load.output, ignore_eos=True)
    asked: dict[str, float] = {}
    seen: dict[str, list[float]] = {}
    left = load.rounds * load.clients
    most_running = 0

    def ask() -> None:
        tokens = torch.randint(0, engine.runner.vocabulary, (load.prompt,), generator=generator).tolist()
        request = engine.submit(tokens, params)
        asked[request], seen[request] = time.perf_counter(), []

    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(load.clients):
        ask()
    left -= load.clients
    while engine.has_work:
        for event in engine.step():
            seen[event.request_id].append(time.perf_counter())
            if event.finish_reason is not None and left:
                left -= 1
                ask()
        most_running = max(most_running, len(engine.scheduler.running))
    duration = time.perf_counter() - start
    return {
        "input": load.prompt,
        "output": load.output,
        "concurrency": load.clients,
        "max_running": most_running,
        "tokens_per_s": sum(map(len, seen.values())) / duration,
        **latencies(asked, seen),
    }


def latencies(asked: dict[str, float], seen: dict[str, list[float]]) -> dict[str, float | int | None]:
    """Of requests that were asked at a time and whose tokens were seen at others, in seconds."""
    first = [(times[0] - asked[request]) * 1e3 for request, times in seen.items()]
    each = [(times[-1] - times[0]) / (len(times) - 1) * 1e3 for times in seen.values() if len(times) > 1]
    gaps = [(b - a) * 1e3 for times in seen.values() for a, b in pairwise(times)]
    return {
        "ttft_p50_ms": statistics.median(first),
        "ttft_p99_ms": percentile(first, 0.99),
        "tpot_p50_ms": statistics.median(each),
        "tpot_p99_ms": percentile(each, 0.99),
        "itl_p50_ms": statistics.median(gaps),
        "itl_p99_ms": percentile(gaps, 0.99),
    }


def measure_interference(bench: Bench, kv: str) -> Iterator[Record]:
    """What a long prompt does to the tokens of a running batch: ITL while it is read, for two sizes of chunk."""
    for chunk in CHUNKS:
        limits = EngineLimits(max_context=LONG_PROMPT + 512, max_running=RUNNING + 1, chunk_tokens=chunk)
        engine = make_engine(bench.weights, kv, limits)
        warm_up(engine)
        prime(engine, [RUNNING_CONTEXT - 7 * row % 64 for row in range(RUNNING)], ENDLESS)
        step_a_few_times(engine)
        found = run_long_prompt(engine, seed=1)
        device_share = device_ms_of_long_prompt(engine, seed=2) / found["ttft_p50_ms"]
        yield bench.record("interference", engine, **found, host_share=1 - device_share)
        cancel_all(engine)
        del engine
        free_memory()


def run_long_prompt(engine: Engine, seed: int) -> dict[str, float]:
    """Submit a long prompt to the running batch, and time everybody's tokens until its first."""
    tokens = torch.randint(0, engine.runner.vocabulary, (LONG_PROMPT,), generator=torch.Generator().manual_seed(seed))
    start = time.perf_counter()
    request = engine.submit(tokens.tolist(), SamplingParams(max_tokens=2, ignore_eos=True))
    gaps, last, first = [], start, None
    while first is None:
        events = engine.step()
        now = time.perf_counter()
        gaps.append((now - last) * 1e3)
        last = now
        first = now if any(event.request_id == request for event in events) else None
    return {
        "input": LONG_PROMPT,
        "output": len(gaps),
        "concurrency": RUNNING,
        "tokens_per_s": RUNNING * len(gaps) / (first - start),
        "ttft_p50_ms": (first - start) * 1e3,
        "itl_p50_ms": statistics.median(gaps),
        "itl_p99_ms": percentile(gaps, 0.99),
    }


def device_ms_of_long_prompt(engine: Engine, seed: int) -> float:
    """Milliseconds that kernels take while another long prompt is read."""
    step_a_few_times(engine)  # the one before ends
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run_long_prompt(engine, seed)
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e3


def step_a_few_times(engine: Engine) -> None:
    """Until the batch is as one that has long been running."""
    for _ in range(4):
        engine.step()


def free_memory() -> None:
    """Give back what deleted engines held."""
    gc.collect()
    torch.cuda.empty_cache()
