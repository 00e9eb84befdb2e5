"""What Triton and the front add to an engine on a GPU, and what happens when its process or its memory goes.

    python -m bench.serving_triton --engine engines/llama-8b-dummy/int4     # into bench/results/serving_triton.json
    python -m bench.serving_triton --engine ... --only starts               # beside the records that are there

- `load`: streams that begin at once, each a prompt of its own; the engine in this process, through Triton's gRPC and
  through the front's SSE, in turn. Clients are processes of their own on the same machine. TTFT is counted from the
  moment at which all are let go, TPOT is a stream's mean time between tokens. `tokens_per_response` above 1 says that
  the sending thread was behind and sent several tokens as one. The front sends text: where most tokens have none, as
  those of a dummy with a tokenizer of bytes, its tokens a second say something, its times to single tokens nothing.
- `faults`: another process takes the card's memory under the server; SIGKILL to Triton's Python stub, until a request
  is answered again, and the pools before and after.
- `starts`: a pool that is larger than the card, and a card that another process has filled: what the operator is told,
  after how long.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.measured_commit import measured_commit
from bench.serving_clients import Clients, Times
from bench.serving_records import percentile
from bench.soak.server import SoakServer, free_port
from eval.environment import describe_machine
from nibble.atomic import write_text
from nibble.errors import NibbleError
from nibble.paths import REPOSITORY_ROOT
from nibble.runtime import Engine, EngineLimits, SamplingParams
from nibble.stage import console, run_stage
from nibble.versions import versions

RESULT = Path(__file__).parent / "results" / "serving_triton.json"
SECTIONS = ("load", "faults", "starts")
WAYS = ("engine", "triton", "front")
LOADS = [(1, 1024), (16, 1024), (64, 1024)]
WARM_TOKENS = 16
LEFT_GIB = 1.5  # what another process leaves of the card: less than any engine here needs
HOG = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(int(free - float(sys.argv[1]) * 2**30), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""

Record = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """The engine under test. context: the longest prompt and answer; most: streams at once."""

    engine_dir: Path
    context: int
    most: int
    repeats: int

    @property
    def names(self) -> tuple[str, str]:
        """Of the model and of the cache, as the engine's folder has them."""
        return self.engine_dir.parent.name, self.engine_dir.name

    @property
    def limits(self) -> EngineLimits:
        return EngineLimits(max_context=self.context, max_running=self.most, max_waiting=4 * self.most)

    def server(self, *arguments: str) -> SoakServer:
        """A server with the limits of the engine in this process."""
        return SoakServer(*self.names, free_port(), (*self.serve_arguments, *arguments))

    @property
    def serve_arguments(self) -> list[str]:
        values = {"--engine": self.engine_dir, "--context": self.context, "--batch": self.most}
        values |= {"--queue": self.limits.max_waiting}
        return [str(part) for pair in values.items() for part in pair]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the options name and write it, record by record."""
    options = build_parser().parse_args(argv)
    context = max(prompt + options.tokens for _, prompt in options.load) + 64
    bench = Bench(options.engine.resolve(), context, max(streams for streams, _ in options.load), options.repeats)
    found: Record = json.loads(options.out.read_text()) if options.out.is_file() else {}
    measured: dict[str, list[Record]] = {}
    for section, record in measure(bench, options):
        console.print_json(json.dumps(record), indent=None)
        measured.setdefault(section, []).append(record | {"commit": measured_commit()})
        write_text(options.out, json.dumps(found | describe(bench) | measured, indent=2) + "\n")
    print(json.dumps(found | describe(bench) | measured))


def measure(bench: Bench, options: argparse.Namespace) -> Iterator[tuple[str, Record]]:
    """Records with their section, as they come. What only waits for a process goes on beside the server's start."""
    wanted = set(options.only)
    if "starts" in wanted and not torch.cuda.is_available():
        raise NibbleError("section starts: needs a GPU, allowed without one: load, faults")
    with ThreadPoolExecutor() as beside:
        in_vain = beside.submit(start_with_too_large_a_pool, bench) if "starts" in wanted else None
        if wanted & {"load", "faults"}:
            loads = "load" in wanted and "engine" in options.ways
            loading = beside.submit(Engine.load, bench.engine_dir, bench.limits) if loads else None
            with bench.server() as server:
                engine = loading.result() if loading else None
                if "load" in wanted:
                    yield from (("load", record) for record in measure_loads(bench, server, engine, options))
                if "faults" in wanted:
                    yield from (("faults", record) for record in measure_faults(server))
        if in_vain is not None:
            yield "starts", in_vain.result()
            with filled_card(LEFT_GIB):
                yield "starts", {"case": f"another process leaves {LEFT_GIB:g} GiB", **start_in_vain(bench)}


def describe(bench: Bench) -> Record:
    """What was measured, on what."""
    model, kv = bench.names
    return {
        "what": "serving through Triton",
        "model": model,
        "kv": kv,
        "triton": "2.51.0",
        "machine": describe_machine(),
        "versions": versions(),
    }


def measure_loads(
    bench: Bench, server: SoakServer, engine: Engine | None, options: argparse.Namespace
) -> Iterator[Record]:
    """Each load in several ways, in turn. engine: the one in this process."""
    with Clients(server, bench.names[0]) as clients:
        for streams, prompt in options.load:
            rounds: list[dict[str, Record]] = []
            for number in range(bench.repeats + 1):  # the first warms up: shorter
                prompts = [make_prompt(prompt, 1000 * number + index) for index in range(streams)]
                tokens = options.tokens if number else min(options.tokens, WARM_TOKENS)
                times = {
                    way: time_engine(engine, prompts, tokens) if way == "engine" else clients.ask(way, prompts, tokens)
                    for way in options.ways
                }
                rounds.append({way: summarize(times[way], tokens) for way in options.ways})
            for way in options.ways:
                taken = [each[way] for each in rounds[1:]]
                values = {name: round(median(each[name] for each in taken), 2) for name in taken[0]}
                yield {"way": way, "streams": streams, "prompt": prompt, "tokens": options.tokens, **values}


def make_prompt(length: int, seed: int) -> str:
    """Random letters, which share no page with another seed's: as many tokens with a dummy's tokenizer of bytes."""
    letters = torch.randint(97, 123, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return "".join(map(chr, letters))


def time_engine(engine: Engine | None, prompts: Sequence[str], tokens: int) -> list[Times]:
    """The engine in this process."""
    assert engine is not None
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    began = time.perf_counter()
    arrivals: dict[str, list[float]] = {engine.submit(engine.encode(text), params): [] for text in prompts}
    while engine.has_work:
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            arrivals[event.request_id].append(now)
    return [Times(began, seen[0], seen[-1], len(seen)) for seen in arrivals.values()]


def summarize(times: Sequence[Times], tokens: int) -> Record:
    """Milliseconds, and tokens a second from the start to the last token."""
    first = [1000 * (each.first - each.began) for each in times]
    gaps = [1000 * (each.last - each.first) / (tokens - 1) for each in times]
    taken = max(each.last for each in times) - min(each.began for each in times)
    return {
        "ttft_p50_ms": median(first),
        "ttft_p99_ms": percentile(first, 0.99),
        "tpot_p50_ms": median(gaps),
        "tpot_p99_ms": percentile(gaps, 0.99),
        "tokens_per_s": len(times) * tokens / taken,
        "tokens_per_response": len(times) * tokens / sum(each.responses for each in times),
    }


def measure_faults(server: SoakServer) -> Iterator[Record]:
    """A card that fills up under a running server, and a killed stub: then the pools must be as large as before."""
    if torch.cuda.is_available():
        with filled_card(0.25):
            yield {"case": "another process takes the card's memory", "still_answers": server.answers()}
    before = read_pools(server)
    seconds = server.recover_from("stub", signal.SIGKILL)
    after = read_pools(server)
    yield {"case": "stub killed", "seconds": round(seconds, 1), "pools": before, "pools_after": after}


def read_pools(server: SoakServer) -> str:
    """What the server's log says of its pools."""
    found = re.findall(r'"nibble: pools: (.+)"', server.settings.log_path.read_text())
    return found[-1] if found else ""


def start_with_too_large_a_pool(bench: Bench) -> Record:
    """Twice the card."""
    _, total = torch.cuda.mem_get_info()
    return {"case": "pool larger than the card", **start_in_vain(bench, "--pool-mb", str(2 * total // 2**20))}


def start_in_vain(bench: Bench, *arguments: str) -> Record:
    """Start a server that can't start: how it ends, after how long, and what it says."""
    command = [sys.executable, "-m", "serve.run", *bench.serve_arguments, "--port", str(free_port())]
    command += ["--certificate", "warn", "--check", *arguments]
    began = time.monotonic()
    ended = subprocess.run(command, cwd=REPOSITORY_ROOT, capture_output=True, text=True, timeout=300, check=False)
    said = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    return {
        "exit_code": ended.returncode,
        "seconds": round(time.monotonic() - began, 1),
        "message": "\n".join(said),
    }


@contextmanager
def filled_card(left_gib: float) -> Iterator[None]:
    """Another process holds all of the card's free memory but so much."""
    command = [sys.executable, "-c", HOG, str(left_gib)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        if process.stdout.readline().strip() != "held":
            raise NibbleError("the process that was to fill the card could not")
        try:
            yield
        finally:
            process.stdin.close()
            process.wait(60)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.serving_triton", description="What Triton adds to an engine, and what it survives."
    )
    parser.add_argument("--engine", type=Path, required=True, help="folder of a built engine")
    parser.add_argument("--load", type=_load, nargs="+", default=LOADS, help="STREAMSxPROMPT")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, help="of section load")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--repeats", type=int, default=2, help="rounds, after one that warms up")
    parser.add_argument("--only", nargs="+", default=list(SECTIONS), choices=SECTIONS)
    parser.add_argument("--out", type=Path, default=RESULT)
    return parser


def _load(text: str) -> tuple[int, int]:
    streams, _, prompt = text.partition("x")
    return int(streams), int(prompt)


if __name__ == "__main__":
    run_stage(main)
