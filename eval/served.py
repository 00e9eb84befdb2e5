"""Does the served endpoint say what the engine says? Greedy answers of both to the same prompts, token by token.

The prompts are long enough that the answers read sealed pages. The server is the one of `make serve`, started on free
ports for this and stopped again. Anything that keeps it from answering is an outcome of the check, not its end: the
measurements before it are kept.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from eval.records import ServedCheck
from eval.windows import Window
from nibble.errors import NibbleError
from nibble.runtime import Engine, SamplingParams
from serve import preflight
from serve.client import TritonLLM
from serve.leftovers import sweep
from serve.repository import write_repository
from serve.settings import RUN_ROOT, EngineOptions, ServeSettings
from serve.supervisor import StopRequest, Supervisor

PROMPTS = 3
PROMPT_TOKENS = 320  # a sink, a recent and an open page, and sealed pages between them
ANSWER_TOKENS = 32
MAX_CONTEXT = 1024
FIRST_PORT, LAST_PORT = 18000, 18999


@dataclass(frozen=True)
class GreedyAnswer:
    """What an engine answered and through which KV format."""

    token_ids: list[int]
    kv: str


GreedyHost = Callable[[str], GreedyAnswer]


def check_served(engine: Engine, engine_dir: Path, windows: list[Window], console: Console) -> ServedCheck:
    """Start the server of `engine_dir`, ask it and the engine in process the same, compare, stop it."""
    prompts = [engine.tokenizer.decode(window.inputs[:PROMPT_TOKENS]) for window in windows[:PROMPTS]]
    try:
        with served_host(engine_dir, console) as served:
            return compare_hosts(in_process_host(engine), served, prompts)
    except NibbleError as error:
        return ServedCheck(outcome="failed", detail=str(error), prompts=0)


def skipped_check(reason: str) -> ServedCheck:
    """The record of a check that was not made."""
    return ServedCheck(outcome="skipped", detail=reason, prompts=0)


def compare_hosts(expected: GreedyHost, served: GreedyHost, prompts: list[str]) -> ServedCheck:
    """Ask both hosts every prompt; the detail names the first prompt and token at which they part."""
    for number, prompt in enumerate(prompts):
        ours, theirs = expected(prompt), served(prompt)
        if ours != theirs:
            return ServedCheck(outcome="different", detail=_difference(number, ours, theirs), prompts=number + 1)
    detail = f"{len(prompts)} prompts, {ANSWER_TOKENS} greedy tokens each, equal token by token"
    return ServedCheck(outcome="same", detail=detail, prompts=len(prompts))


def in_process_host(engine: Engine) -> GreedyHost:
    """The engine of this process."""
    params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)

    def answer(prompt: str) -> GreedyAnswer:
        (completion,) = engine.generate([engine.encode(prompt)], params)
        return GreedyAnswer(completion.token_ids, engine.kv_name)

    return answer


@contextmanager
def served_host(engine_dir: Path, console: Console) -> Iterator[GreedyHost]:
    """A Triton server of the engine, up while the block runs. NibbleError when it can't start."""
    sweep(RUN_ROOT)
    settings = ServeSettings(
        name=f"{engine_dir.parent.name}-{engine_dir.name}-eval",
        engine_dir=engine_dir,
        http_port=_free_ports(),
        options=EngineOptions(max_context=MAX_CONTEXT, max_running=2),
    )
    preflight.check(settings)
    write_repository(settings)
    with Supervisor(settings, console, StopRequest()) as supervisor:
        supervisor.start()
        client = TritonLLM(f"{settings.client_host}:{settings.grpc_port}")

        def answer(prompt: str) -> GreedyAnswer:
            chunk = client.generate(prompt, max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
            return GreedyAnswer(list(chunk.token_ids), chunk.kv_format)

        yield answer


def _difference(number: int, ours: GreedyAnswer, theirs: GreedyAnswer) -> str:
    if ours.kv != theirs.kv:
        return f"prompt {number}: the engine answers through KV {ours.kv}, the server through {theirs.kv}"
    pairs = zip(ours.token_ids, theirs.token_ids, strict=False)
    shortest = min(len(ours.token_ids), len(theirs.token_ids))
    token = next((at for at, (left, right) in enumerate(pairs) if left != right), shortest)
    return f"prompt {number}, token {token}: engine {ours.token_ids[token:][:4]}, server {theirs.token_ids[token:][:4]}"


def _free_ports() -> int:
    """The first of three neighbouring ports that nobody listens on."""
    for port in range(FIRST_PORT, LAST_PORT, 3):
        if all(_is_free(port + offset) for offset in range(3)):
            return port
    raise NibbleError(
        f"ports: got none free from {FIRST_PORT} to {LAST_PORT}, allowed three neighbouring ones; free some"
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
