"""Speed and size of the native engine on this machine: `python -m bench.engine_cpu --model smollm2-135m --kv int4`.

Three questions, answered in one process, taken in turn:
- how fast is one stream beside transformers' own generate: same prompt, tokens, weights type and torch threads;
- how much more do several streams at once give than one;
- how many sequences' sealed tokens does a pool of fixed bytes hold beside fp16.

Decoding is timed from the first generated token to the last, for both. Writes bench/results/engine_cpu.json; the last
line of stdout is the same JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from bench.measured_commit import measured_commit
from bench.pool_capacity import PoolCapacity, fill_pool
from eval.environment import describe_machine
from eval.speed import random_prompts, time_streams
from eval.subjects import require_engine
from nibble.atomic import write_text
from nibble.formats import KVFormat
from nibble.models import load_model, resolve_source
from nibble.recipes import load_model_recipe
from nibble.runtime import Engine, EngineLimits
from nibble.runtime.cache import CacheSpec
from nibble.stage import console, run_stage
from nibble.versions import versions

RESULT = Path(__file__).parent / "results" / "engine_cpu.json"
progress = Console(stderr=True)
TARGETS = {"decode_ratio_to_transformers": 0.7, "streams_ratio": 3.0, "sealed_tokens_ratio": 3.3}


@dataclass(frozen=True)
class BenchPlan:
    """What to time. Sizes in tokens, the pool in MiB; a median of `repeats`."""

    model: str
    kv: str
    prompt_tokens: int
    decode_tokens: int
    streams: int
    repeats: int
    pool_mb: int
    pool_context: int
    seed: int


@dataclass
class Rates:
    """Decoded tokens per second of every repeat."""

    transformers: list[float] = field(default_factory=list)
    one_stream: list[float] = field(default_factory=list)
    all_streams: list[float] = field(default_factory=list)


class TokenClock(BaseStreamer):
    """Notes when generate hands out each token; the first call is the prompt."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self._is_prompt:
            self.arrivals.append(time.perf_counter())
        self._is_prompt = False

    def end(self) -> None: ...

    @property
    def tokens_per_s(self) -> float:
        return (len(self.arrivals) - 1) / (self.arrivals[-1] - self.arrivals[0])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the record. NibbleError when the engine is missing."""
    plan, threads = _plan(arguments)
    if threads:
        torch.set_num_threads(threads)
    recipe = load_model_recipe(plan.model)
    limits = EngineLimits(max_context=plan.prompt_tokens + plan.decode_tokens, max_running=plan.streams)
    engine = Engine.load(require_engine(plan.model, plan.kv), limits)
    rates = measure_rates(engine, load_model(resolve_source(recipe), recipe.dtype), plan)
    record = make_record(plan, rates, *measure_capacity(engine.spec, plan))
    _print(record)
    RESULT.parent.mkdir(exist_ok=True)
    write_text(RESULT, json.dumps(record, indent=2) + "\n")
    print(json.dumps(record), flush=True)


def measure_rates(engine: Engine, model: PreTrainedModel, plan: BenchPlan) -> Rates:
    """Time transformers, one stream and many, in turn; a warm-up round first. Every round has new prompts."""
    prompts = random_prompts(len(engine.tokenizer), plan.prompt_tokens, plan.seed)
    rates = Rates()
    for number in range(plan.repeats + 1):
        progress.print(f"round {number} of {plan.repeats}" + ("" if number else " (warm-up)"))
        one, many = next(prompts), [next(prompts) for _ in range(plan.streams)]
        rates.transformers.append(time_transformers(model, one, plan.decode_tokens))
        rates.one_stream.append(time_streams(engine, [one], plan.decode_tokens).decode_tokens_per_s)
        rates.all_streams.append(time_streams(engine, many, plan.decode_tokens).decode_tokens_per_s)
    engine.check_integrity()
    return Rates(rates.transformers[1:], rates.one_stream[1:], rates.all_streams[1:])


def time_transformers(model: PreTrainedModel, prompt: list[int], decode_tokens: int) -> float:
    """Tokens per second of transformers' generate after its first token, greedy, exactly `decode_tokens` long."""
    clock, ids = TokenClock(), torch.tensor([prompt])
    config = GenerationConfig(max_new_tokens=decode_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=clock)
    return clock.tokens_per_s


def measure_capacity(spec: CacheSpec, plan: BenchPlan) -> tuple[PoolCapacity, PoolCapacity]:
    """What a pool holds in the engine's format and in fp16."""
    fp16 = replace(spec, formats=(KVFormat.named("fp16"),) * len(spec.formats), scales={})
    pool_bytes = plan.pool_mb * 2**20
    return fill_pool(spec, pool_bytes, plan.pool_context), fill_pool(fp16, pool_bytes, plan.pool_context)


def make_record(plan: BenchPlan, rates: Rates, quantized: PoolCapacity, fp16: PoolCapacity) -> dict[str, Any]:
    """The figures with what they were measured on."""
    medians = {name: median(values) for name, values in asdict(rates).items()}
    figures = {
        "decode_ratio_to_transformers": medians["one_stream"] / medians["transformers"],
        "streams_ratio": medians["all_streams"] / medians["one_stream"],
        "sealed_tokens_ratio": quantized.sealed_tokens / fp16.sealed_tokens,
    }
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "plan": asdict(plan),
        "figures": {**figures, "whole_cache_ratio": fp16.bytes_per_sequence / quantized.bytes_per_sequence},
        "targets": TARGETS,
        "met": {name: figures[name] >= target for name, target in TARGETS.items()},
        "decode_tokens_per_s": medians,
        "decode_tokens_per_s_each": asdict(rates),
        "pool": {"quantized": asdict(quantized), "fp16": asdict(fp16)},
        "machine": {**describe_machine(), "load_average": round(os.getloadavg()[0], 1)},
        "versions": versions(),
        "commit": measured_commit(),
    }


def _print(record: dict[str, Any]) -> None:
    table = Table(title=f"{record['plan']['model']}, KV {record['plan']['kv']}, {record['plan']['repeats']} repeats")
    for heading in ("figure", "measured", "target"):
        table.add_column(heading, justify="left" if heading == "figure" else "right")
    for name, value in record["decode_tokens_per_s"].items():
        table.add_row(f"decode tokens/s, {name.replace('_', ' ')}", f"{value:.1f}", "")
    for name, value in record["figures"].items():
        target = f"{TARGETS[name]}" if name in TARGETS else ""
        table.add_row(name.replace("_", " "), f"{value:.2f}", target)
    console.print(table)


def _plan(arguments: Sequence[str] | None) -> tuple[BenchPlan, int | None]:
    parser = argparse.ArgumentParser(prog="python -m bench.engine_cpu", description="Speed and size of the engine.")
    parser.add_argument("--model", default="smollm2-135m", help="model recipe, folder or hub id")
    parser.add_argument("--kv", default="int4", help="KV recipe of a built engine")
    for name, default in (("prompt-tokens", 512), ("decode-tokens", 64), ("streams", 8), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("pool-mb", 1024), ("pool-context", 2048), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, help="torch threads for both (default: torch's choice)")
    options = vars(parser.parse_args(arguments))
    threads = options.pop("threads")
    return BenchPlan(**options), threads


if __name__ == "__main__":
    run_stage(main)
