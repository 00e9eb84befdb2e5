"""How fast and how large a serving engine is on a GPU: decode steps against the roofline, capacity, time to the first
token, closed loops of clients; for each KV format, with dummy weights.

    python -m bench.serving --model llama-8b --kv fp16 int4                 # into bench/results/serving.json
    python -m bench.serving --kv int8 --only step                           # beside the records that are there
    python -m bench.serving --model llama-70b --gpus 2 --only capacity      # tensor parallel, a process a GPU
    python -m bench.serving_plot                                            # docs/serving.png from the records

    step       decode steps at a batch and a context, beside the time that reading weights and cache would take
    capacity   how many requests of a context fit, and the step at fp16's most, at twice that, and at the format's own
    first      time to the first token of one prompt
    sweep      clients that ask again as soon as they are answered
    memory     more of them than fit, in a cache of one size for all formats
    interference   tokens of a running batch while a long prompt is read

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from bench.attention_cache import read_bandwidth
from bench.measured_commit import measured_commit
from bench.serving_engine import cache_bytes_read, cancel_all, dummy_weights, make_engine, prime
from bench.serving_load import ENDLESS, free_memory, measure_equal_memory, measure_interference, measure_sweep
from bench.serving_records import Bench, Record, percentile
from nibble.formats import FORMATS
from nibble.runtime import Engine, EngineLimits, SamplingParams
from nibble.runtime.parallel import join
from nibble.runtime.shards import WHOLE, Shards

RESULTS = Path(__file__).parent / "results" / "serving.json"
STEPS = [(1, 8192), (8, 8192), (64, 1024), (64, 8192)]  # batch, context
CAPACITY_CONTEXT = 32768
MOST_RUNNING = {"llama-8b": 128, "llama-70b": 32}  # a GPU at that context: more than fit, so that memory counts
TIMED_STEPS = 48


def time_steps(engine: Engine, count: int) -> list[float]:
    """Milliseconds between the tokens of consecutive steps; all running sequences decode."""
    for _ in range(4):
        engine.step()
    times = []
    last = time.perf_counter()
    for _ in range(count):
        engine.step()
        now = time.perf_counter()
        times.append((now - last) * 1e3)
        last = now
    return times


def time_graph(engine: Engine) -> float:
    """Milliseconds of the decode graph alone, as its last step left its buffers."""
    graphs = engine.runner.graphs  # type: ignore[attr-defined]
    running = len(engine.scheduler.running)
    replay = graphs.replay_of(running)
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(20):
        replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 20


def measure_batch(bench: Bench, section: str, engine: Engine, **extra: int) -> Record:
    """Decode steps of the sequences that run; the cache that they read is that of the step in the middle."""
    torch.cuda.reset_peak_memory_stats()
    contexts = [len(sequence.tokens) + TIMED_STEPS // 2 for sequence in engine.scheduler.running]
    times = time_steps(engine, TIMED_STEPS)
    read = bench.weights.num_bytes + cache_bytes_read(engine.spec, contexts) // bench.weights.shards.size
    graph_ms = time_graph(engine)
    step_ms = statistics.mean(times)
    return bench.record(
        section,
        engine,
        input=max(contexts),
        output=TIMED_STEPS,
        concurrency=len(contexts),
        tokens_per_s=len(contexts) / step_ms * 1e3,
        tpot_p50_ms=statistics.median(times),
        tpot_p99_ms=percentile(times, 0.99),
        roofline_ratio=step_ms / (read / bench.ceiling * 1e3),
        host_share=1 - graph_ms / step_ms,
        **extra,
    )


def measure_steps(bench: Bench, kv: str) -> Iterator[Record]:
    """Lengths differ by up to a page, so that not all sequences seal in the same step."""
    batch, context = max(batch for batch, _ in STEPS), max(context for _, context in STEPS)
    limits = EngineLimits(max_context=context + 512, max_running=batch, chunk_tokens=16384)
    engine = make_engine(bench.weights, kv, limits)
    for batch, context in STEPS:
        contexts = [context - (7 * row) % 64 for row in range(batch)]
        prime(engine, contexts, ENDLESS)
        yield measure_batch(bench, "step", engine)
        cancel_all(engine)


def measure_capacity(bench: Bench, kv: str, most_fp16: int | None) -> Iterator[Record]:
    """The most requests of a long context, and the step there; for other formats also at twice fp16's most."""
    most = MOST_RUNNING[bench.model] * bench.weights.shards.size
    limits = EngineLimits(max_context=CAPACITY_CONTEXT + 1024, max_running=most, chunk_tokens=4096)
    engine = make_engine(bench.weights, kv, limits)
    counts = [most] if most_fp16 is None else [most_fp16, 2 * most_fp16, most]
    for count in counts:
        running = prime(engine, [CAPACITY_CONTEXT - row % 64 for row in range(count)], ENDLESS)
        for sequence in engine.scheduler.waiting:
            engine.cancel(sequence.request_id)
        if running < count:  # a full pool: leave room to grow while it is timed
            engine.cancel(engine.scheduler.running[-1].request_id)
        engine.step()
        yield measure_batch(bench, "capacity", engine, max_running=running)
        cancel_all(engine)


def measure_first_token(bench: Bench, kv: str, prompt: int = 8192) -> Iterator[Record]:
    """One prompt at a time; each is new."""
    engine = make_engine(bench.weights, kv, EngineLimits(max_context=prompt + 256, max_running=2, chunk_tokens=8192))
    generator = torch.Generator().manual_seed(0)
    times = []
    for _ in range(6):
        tokens = torch.randint(0, engine.runner.vocabulary, (prompt,), generator=generator).tolist()
        times.append(engine.generate([tokens], SamplingParams(max_tokens=1))[0].ttft_s * 1e3)
    first = statistics.median(times[2:])
    yield bench.record(
        "first", engine, input=prompt, output=1, concurrency=1, tokens_per_s=prompt / first * 1e3, ttft_p50_ms=first,
    )  # fmt: skip


def measure_capacities(bench: Bench, formats: list[str]) -> Iterator[Record]:
    """Of every format; fp16, if it is there, first."""
    most_fp16: int | None = None
    for kv in formats:
        for record in measure_capacity(bench, kv, most_fp16):
            yield record
            if kv == "fp16":
                most_fp16 = record.max_running
        free_memory()


SECTIONS: dict[str, Callable[[Bench, str], Iterator[Record]]] = {
    "step": measure_steps,
    "first": measure_first_token,
    "sweep": measure_sweep,
    "interference": measure_interference,
    "memory": measure_equal_memory,
}


def measure(bench: Bench, formats: list[str], sections: list[str]) -> Iterator[Record]:
    """Section by section, every format."""
    if "capacity" in sections:
        yield from measure_capacities(bench, formats)
    for section in (name for name in SECTIONS if name in sections):
        for kv in formats:
            yield from SECTIONS[section](bench, kv)
            free_memory()


def _records_to_keep(
    path: Path, model: str, kind: str, gpus: int, formats: list[str], sections: list[str]
) -> list[dict[str, object]]:
    """Records of earlier runs that this one does not measure again."""
    records = json.loads(path.read_text()) if path.is_file() else []
    measured = {"model": [model], "weights": [f"{kind} dummy"], "gpus": [gpus], "kv": formats, "section": sections}
    return [r for r in records if any(r[key] not in values for key, values in measured.items())]


def main() -> None:
    """Measure what the options name and write the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--weights", default="bf16", choices=["bf16", "fp8"])
    parser.add_argument("--gpus", type=int, default=1, help="tensor parallel over so many")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    parser.add_argument("--kv", nargs="*", default=["fp16", "int8", "k8v4", "int4"], choices=list(FORMATS))
    parser.add_argument("--only", nargs="*", default=["capacity", *SECTIONS])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    model, kind = options.model, options.weights
    shards = join_ranks(options.gpus, options.rank, options.address)
    weights = dummy_weights(model, kind, shards)
    ceiling = read_bandwidth() * 1e12 if shards.rank == 0 else 1.0  # the first writes the records
    bench = Bench(model, kind, weights, ceiling, measured_commit())
    kept = _records_to_keep(options.out, model, kind, options.gpus, options.kv, options.only)
    records = []
    for record in measure(bench, options.kv, options.only):
        records.append(asdict(record))
        if shards.rank == 0:
            options.out.write_text(json.dumps(kept + records, indent=1) + "\n")
    if shards.rank == 0:
        read = round(bench.ceiling / 1e12, 3)
        print(json.dumps({"read_tbps": read, "records": len(records), "results": str(options.out)}))


def join_ranks(gpus: int, rank: int, address: str) -> Shards:
    """This process among those of `gpus`; the first starts the others with its own options. Each does all the work in
    step with the others: what a scheduler decides depends on requests and tokens alone."""
    if gpus == 1:
        return WHOLE
    if rank == 0:
        address = f"file://{tempfile.mkdtemp()}/meeting"
        for other in range(1, gpus):
            options = ["--rank", str(other), "--address", address]
            subprocess.Popen([sys.executable, "-m", "bench.serving", *sys.argv[1:], *options], stdout=sys.stderr)
    torch.cuda.set_device(rank)
    return join(rank, gpus, address)


if __name__ == "__main__":
    main()
