"""What serving adds and how fast it recovers, on this machine: `python -m bench.serving_cpu`.

- `layers`, for each number of the engine's threads: 16 streams decoded by the engine in this process, through Triton's
  gRPC, and through the front's SSE, same prompts; clients run on the same cores. `gap_ms` is the mean time between
  tokens of a stream, `added_gap_ms` what a layer adds to the engine's of the same round (medians over rounds), and
  `added_ms_per_token` that time for each of the tokens, one a stream, that come out in it;
- `recovery_s`: from SIGKILL of the stub, of tritonserver and of the front, and from SIGSTOP of the stub (a hang, which
  only the canary can find), until a request is answered again. Each time a fresh server, for the supervisor waits
  longer when failures come in a row; a median of three.

Engine and server take turns, round by round, for a machine's speed wanders. Writes bench/results/serving_cpu.json; the
last line is the same JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import openai
from rich.console import Console

from bench.measured_commit import measured_commit
from bench.soak.server import SoakServer, free_port
from eval.environment import describe_machine
from nibble.atomic import write_text
from nibble.paths import engine_dir
from nibble.runtime import Engine, EngineLimits, SamplingParams
from nibble.stage import run_stage
from nibble.versions import versions
from serve.client import TritonLLM

RESULT = Path(__file__).parent / "results" / "serving_cpu.json"
TARGETS = {"added_ms_per_token": 5.0, "stub_killed": 15.0, "server_killed": 30.0}
LIMITS = EngineLimits(max_context=512, max_running=16, max_waiting=64)
FAULTS: dict[str, tuple[str, signal.Signals]] = {
    "stub_killed": ("stub", signal.SIGKILL),
    "server_killed": ("server", signal.SIGKILL),
    "front_killed": ("front", signal.SIGKILL),
    "stub_hung": ("stub", signal.SIGSTOP),
}
WORDS = ("river", "stone", "lamp", "winter", "bread", "ship", "music", "glass")
progress = Console(stderr=True)

Arrivals = list[float]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write."""
    arguments = build_parser().parse_args(argv)
    layers = [time_layers(arguments, threads) for threads in arguments.threads]
    recoveries = {name: [recover(arguments, *fault) for _ in range(3)] for name, fault in FAULTS.items()}
    result = {
        "what": "serving on a CPU",
        "model": arguments.model,
        "kv": arguments.kv,
        "streams": arguments.streams,
        "decode_tokens": arguments.tokens,
        "layers": layers,
        "recovery_s": {name: round(median(times), 2) for name, times in recoveries.items()},
        "recoveries_s": {name: [round(value, 2) for value in times] for name, times in recoveries.items()},
        "targets": TARGETS,
        "repeats": arguments.repeats,
        "load_average_15_min": os.getloadavg()[2],  # what else the machine was doing
        "machine": describe_machine(),
        "versions": versions(),
        "commit": measured_commit(),
    }
    write_text(arguments.out, json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def server_arguments(threads: int) -> list[str]:
    """The limits of the engine in this process, for the server's."""
    values = {"--context": LIMITS.max_context, "--batch": LIMITS.max_running, "--queue": LIMITS.max_waiting}
    return [str(part) for pair in {**values, "--threads": threads}.items() for part in pair]


def make_prompt(index: int) -> str:
    """A short prompt that shares no page with another."""
    return f"{index}: " + " ".join(WORDS[(index + step) % len(WORDS)] for step in range(12))


def mean_gap_ms(streams: Sequence[Arrivals]) -> float:
    """Milliseconds between tokens of a stream, mean over streams; the time to the first token is left out."""
    return 1000 * fmean((arrivals[-1] - arrivals[0]) / (len(arrivals) - 1) for arrivals in streams)


def time_engine(engine: Engine, arguments: argparse.Namespace) -> list[Arrivals]:
    """The engine in this process, without Triton."""
    params = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True)
    arrivals: dict[str, Arrivals] = {}
    for index in range(arguments.streams):
        arrivals[engine.submit(engine.encode(make_prompt(index)), params)] = []
    while engine.has_work:
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            arrivals[event.request_id].append(now)
    return list(arrivals.values())


def time_layers(arguments: argparse.Namespace, threads: int) -> dict[str, Any]:
    """Time between tokens of the engine alone, through gRPC, and through the front, in turn; what each layer adds."""
    engine = Engine.load(engine_dir(arguments.model, arguments.kv), replace(LIMITS, threads=threads))
    with SoakServer(arguments.model, arguments.kv, free_port(), server_arguments(threads)) as server:
        rounds = time_rounds(engine, server, arguments)
    added = {name: median(each[name] - each["engine"] for each in rounds) for name in ("triton", "front")}
    return {
        "threads": threads,
        "gap_ms": {name: round(median(each[name] for each in rounds), 1) for name in rounds[0]},
        "added_gap_ms": {name: round(value, 1) for name, value in added.items()},
        "added_ms_per_token": {name: round(value / arguments.streams, 2) for name, value in added.items()},
        "rounds_ms": [{name: round(value, 1) for name, value in each.items()} for each in rounds],
    }


def time_rounds(engine: Engine, server: SoakServer, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Milliseconds between tokens by layer, round by round."""
    llm = TritonLLM(f"127.0.0.1:{server.port + 1}")
    client = openai.OpenAI(base_url=f"{server.front_url}/v1", api_key="-")

    def through_triton(index: int) -> Arrivals:
        stream = llm.stream(make_prompt(index), max_tokens=arguments.tokens, ignore_eos=True)
        return [time.perf_counter() for _ in stream]

    def through_front(index: int) -> Arrivals:
        extra = {"ignore_eos": True}
        stream = client.completions.create(
            model=arguments.model, prompt=make_prompt(index), max_tokens=arguments.tokens, temperature=0, stream=True,
            extra_body=extra,
        )  # fmt: skip
        return [time.perf_counter() for event in stream if event.choices]

    def at_once(way: Callable[[int], Arrivals]) -> list[Arrivals]:
        with ThreadPoolExecutor(arguments.streams) as pool:
            return list(pool.map(way, range(arguments.streams)))

    rounds = []
    for _ in range(arguments.repeats):
        rounds.append(
            {
                "engine": mean_gap_ms(time_engine(engine, arguments)),
                "triton": mean_gap_ms(at_once(through_triton)),
                "front": mean_gap_ms(at_once(through_front)),
            }
        )
        progress.print(", ".join(f"{name} {value:.1f} ms a token" for name, value in rounds[-1].items()))
    return rounds


def recover(arguments: argparse.Namespace, victim: str, number: signal.Signals) -> float:
    """Seconds from a signal to one process of a fresh server until it is ready again."""
    with SoakServer(arguments.model, arguments.kv, free_port(), server_arguments(arguments.threads[-1])) as server:
        seconds = server.recover_from(victim, number)
    progress.print(f"{number.name} to the {victim}: ready again after {seconds:.1f} s")
    return seconds


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.serving_cpu", description="What serving adds and survives.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kv", default="int4")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48, help="of each stream")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of the engine; the last for recovery")
    parser.add_argument("--repeats", type=int, default=4, help="rounds of engine, Triton, front")
    parser.add_argument("--out", type=Path, default=RESULT)
    return parser


if __name__ == "__main__":
    run_stage(main)
