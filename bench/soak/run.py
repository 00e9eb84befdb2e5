"""Load and faults against a server of its own, on loopback, for a bounded time: `make soak SOAK_MINUTES=10 STREAMS=16`.

    python -m bench.soak.run --minutes 10 --streams 16

Clients of every kind ask at once (bench/soak/workload.py), the pool is too small for them all, and every `KILL_EVERY_S`
seconds a process of the server is killed with SIGKILL in mid-stream: stub, tritonserver, front in turn. Passes when no
answer was lost, mixed up, truncated or different from the quiet run's, when every error was told and came while the
server was being killed, and when memory stayed flat.

Writes bench/results/soak_cpu.json; the last line is the same JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from bench.measured_commit import measured_commit
from bench.soak.client import SoakClient, Tally
from bench.soak.load import run_load
from bench.soak.server import SoakServer, free_port
from bench.soak.workload import make_prompts
from eval.environment import describe_machine
from nibble.atomic import write_text
from nibble.errors import NibbleError
from nibble.stage import run_stage
from nibble.versions import versions

RESULT = Path(__file__).parent.parent / "results" / "soak_cpu.json"
KILL_EVERY_S = 75.0
SAMPLE_EVERY_S = 2.0
BATCH = 8
LONG_REPEATS = 170  # most of the context: a pool of the least size holds the sealed pages of one or two such sequences
VICTIMS = ("stub", "server", "front")
SEALED = 'nibble_pages{{[^}}]*pool="sealed",state="{}"[^}}]*}}'
GROWTH_MIB, GROWTH_RATIO = 24.0, 1.1
progress = Console(stderr=True)


@dataclass
class Record:
    """What was seen besides the answers. memory: MiB by process, of each process's whole life; pools: pages in use."""

    recoveries: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    fullest_pool: float = 0.0
    preemptions: float = 0.0


def main(argv: Sequence[str] | None = None) -> None:
    """Run the soak. Raises NibbleError when something was wrong."""
    arguments = build_parser().parse_args(argv)
    tally, record = Tally(), Record()
    server = SoakServer(arguments.model, arguments.kv, free_port(), server_arguments(arguments))
    with server:
        asyncio.run(soak_server(server, arguments, tally, record))
    result = summarize(arguments, tally, record)
    write_text(arguments.out, json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    if result["problems"]:
        raise NibbleError("soak: " + "\n".join(result["problems"][:10]))


def server_arguments(arguments: argparse.Namespace) -> list[str]:
    """A server whose queue and pool are smaller than the load."""
    sizes = {"--context": 768, "--batch": BATCH, "--queue": arguments.streams, "--pool-mb": arguments.pool_mb}
    return [str(part) for pair in sizes.items() for part in pair]


async def soak_server(server: SoakServer, arguments: argparse.Namespace, tally: Tally, record: Record) -> None:
    """Load, kill and watch until the time is up."""
    prompts = make_prompts(arguments.seed, long_repeats=LONG_REPEATS)
    client = SoakClient(server.front_url, arguments.model, prompts, tally)
    seconds = arguments.minutes * 60
    watchers = [asyncio.create_task(sample(server, client, record))]
    if not arguments.no_kills:
        watchers.append(asyncio.create_task(kill_now_and_then(server, client, record, time.monotonic() + seconds)))
    try:
        await run_load(client, prompts, streams=arguments.streams, seconds=seconds, seed=arguments.seed)
    finally:
        for watcher in watchers:
            watcher.cancel()
        ends = await asyncio.gather(*watchers, return_exceptions=True)
        await client.close()
    for end in ends:
        if isinstance(end, Exception):  # a watcher that fell over saw nothing of the rest
            raise end


async def kill_now_and_then(server: SoakServer, client: SoakClient, record: Record, until: float) -> None:
    """Kill one process after another. The last one is early enough for its recovery to be seen."""
    for name in itertools.cycle(VICTIMS):
        await asyncio.sleep(KILL_EVERY_S)
        if time.monotonic() + KILL_EVERY_S / 2 > until:
            return
        client.is_disturbed = True
        seconds = await asyncio.to_thread(server.recover_from, name, signal.SIGKILL, until_answered=False)
        record.recoveries.append({"killed": name, "seconds": round(seconds, 2)})
        progress.print(f"killed the {name}; ready again after {seconds:.1f} s")
        await asyncio.sleep(3)  # the last requests that it hit learn of it
        client.is_disturbed = False


async def sample(server: SoakServer, client: SoakClient, record: Record) -> None:
    """Memory and pools, now and then; not while a process is gone."""
    while True:
        await asyncio.sleep(SAMPLE_EVERY_S)
        try:
            usage = await asyncio.to_thread(server.memory_mib)
            used, free = [await asyncio.to_thread(server.metric, SEALED.format(state)) for state in ("used", "free")]
            preemptions = await asyncio.to_thread(server.metric, "nibble_preemptions_total")
        except (NibbleError, OSError, AssertionError, IndexError, HTTPException):
            continue
        if not used + free:  # the server is up, its engine is not yet
            continue
        for name, mib in usage.items():
            record.memory.setdefault(name, []).append((server.victim(name).pid, mib))
        record.preemptions = max(record.preemptions, preemptions)
        record.fullest_pool = max(record.fullest_pool, used / (used + free))
        sizes = ", ".join(f"{name} {mib:.0f} MiB" for name, mib in usage.items())
        told = f"{sum(client.tally.done.values())} requests, {len(client.tally.wrong)} wrong"
        progress.print(f"{told}, {used:.0f} of {used + free:.0f} sealed pages, {sizes}")


def growth_mib(samples: list[tuple[int, float]]) -> tuple[float, float]:
    """Of the process that lived longest: memory early (second fifth) and late (last fifth), medians in MiB."""
    by_pid: dict[int, list[float]] = {}
    for pid, mib in samples:
        by_pid.setdefault(pid, []).append(mib)
    longest = max(by_pid.values(), key=len, default=[])
    fifth = max(1, len(longest) // 5)
    if len(longest) < 5:
        return 0.0, 0.0
    return median(longest[fifth : 2 * fifth]), median(longest[-fifth:])


def summarize(arguments: argparse.Namespace, tally: Tally, record: Record) -> dict[str, Any]:
    """The result with everything that was wrong."""
    problems = list(tally.wrong)
    memory = {name: growth_mib(samples) for name, samples in record.memory.items()}
    for name, (early, late) in memory.items():
        if late - early > GROWTH_MIB and late > early * GROWTH_RATIO:
            problems.append(f"memory of {name} grew from {early:.0f} to {late:.0f} MiB")
    return {
        "what": "soak",
        "minutes": arguments.minutes,
        "streams": arguments.streams,
        "model": arguments.model,
        "kv": arguments.kv,
        "pool_mb": arguments.pool_mb,
        "requests": dict(sorted(tally.done.items())),
        "requests_total": sum(tally.done.values()),
        "answer_tokens": tally.tokens,
        "refused_by_full_queue": tally.queue_full,
        "errors_told_during_kills": tally.told_errors,
        "recoveries": record.recoveries,
        "preemptions": record.preemptions,
        "fullest_sealed_pool": round(record.fullest_pool, 3),
        "memory_mib_early_late": {name: [round(early, 1), round(late, 1)] for name, (early, late) in memory.items()},
        "problems": problems[:50],
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "load_average_15_min": os.getloadavg()[2],  # what else the machine was doing
        "machine": describe_machine(),
        "versions": versions(),
        "commit": measured_commit(),
    }


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak.run", description="Load and faults, every answer checked."
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kv", default="int4")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--pool-mb", type=int, default=60, help="as small as the server takes, so that it is full")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-kills", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULT)
    return parser


if __name__ == "__main__":
    run_stage(main)
