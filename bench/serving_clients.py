"""Clients of a server that is measured: streams spread over processes, so that the clients are not what is measured."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from urllib.parse import urlsplit

from bench.soak.server import SoakServer
from nibble.errors import NibbleError
from serve.client import TritonLLM

PROCESSES = 8
LEAD_S = 0.3  # from handing out the work until all streams begin


@dataclass(frozen=True)
class Times:
    """Of one stream, in seconds of the machine's clock: asked, first token, last token. responses: how many."""

    began: float
    first: float
    last: float
    responses: int


@dataclass(frozen=True)
class Target:
    """Where to ask. way: "triton" or "front"."""

    way: str
    grpc_url: str
    front_url: str
    model: str


class Clients:
    """Processes that ask one server. Use as a context manager."""

    def __init__(self, server: SoakServer, model: str) -> None:
        self._server, self._model = server, model
        self._pool = ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn"))

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pool.shutdown()

    def ask(self, way: str, prompts: Sequence[str], tokens: int) -> list[Times]:
        """One stream a prompt, all at once; each answer has `tokens` tokens. NibbleError when one is cut short."""
        target = Target(way, f"127.0.0.1:{self._server.port + 1}", self._server.front_url, self._model)
        shares = [list(prompts[place::PROCESSES]) for place in range(min(PROCESSES, len(prompts)))]
        start = time.perf_counter() + LEAD_S
        return [
            times for share in self._pool.map(partial(_ask_share, target, tokens, start), shares) for times in share
        ]


def _ask_share(target: Target, tokens: int, start: float, prompts: Sequence[str]) -> list[Times]:
    """In a process of its own."""
    ask = {"triton": _through_triton, "front": _through_front}[target.way]

    def ask_one(prompt: str) -> Times:
        time.sleep(max(0.0, start - time.perf_counter()))
        began = time.perf_counter()
        return Times(began, *ask(target, tokens, prompt))

    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(ask_one, prompts))


def _through_triton(target: Target, tokens: int, prompt: str) -> tuple[float, float, int]:
    """When the first and the last token came over gRPC, and in how many responses."""
    first = last = 0.0
    count = responses = 0
    for chunk in TritonLLM(target.grpc_url).stream(prompt, max_tokens=tokens, ignore_eos=True):
        last = time.perf_counter()
        first = first or last
        count += len(chunk.token_ids)
        responses += bool(chunk.token_ids)
    if count != tokens:
        raise NibbleError(f"triton: got {count} tokens, allowed {tokens}")
    return first, last, responses


def _through_front(target: Target, tokens: int, prompt: str) -> tuple[float, float, int]:
    """The same over the front's SSE; tokens are counted by its usage, since an event may have no text."""
    body = {
        "model": target.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
        "ignore_eos": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    connection = http.client.HTTPConnection(urlsplit(target.front_url).netloc, timeout=120)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    first = last = 0.0
    responses = 0
    usage: dict[str, int] = {}
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if event.get("choices"):
            last = time.perf_counter()
            first = first or last
            responses += 1
        usage = event.get("usage") or usage
    if answer.status != 200 or usage.get("completion_tokens") != tokens:
        raise NibbleError(f"front: got {answer.status} and {usage or 'no usage'}, allowed 200 and {tokens} tokens")
    return first, last, responses
