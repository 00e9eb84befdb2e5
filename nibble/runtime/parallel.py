"""One engine over several GPUs: a process for each, and in each the same engine doing the same steps.

The first process takes requests. Before each step it tells the others what was submitted and cancelled; from then on
every scheduler decides alike, since its decisions depend on requests and tokens alone, and tokens are the first rank's.

    first     engine = load_leading_engine(folder, limits, size)      # starts the others
    others    python -m nibble.runtime.parallel --engine ... --rank 1 --size 2 --port ...
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from nibble.errors import NibbleError
from nibble.paths import REPOSITORY_ROOT
from nibble.runtime.device import log
from nibble.runtime.engine import Engine
from nibble.runtime.request import EngineLimits, SamplingParams, TokenEvent
from nibble.runtime.shards import Shards

STEP_TIMEOUT = timedelta(minutes=10)  # of a sum over the ranks: one that waits longer has lost another
IDLE_TIMEOUT = timedelta(days=20)  # of an order: a server may have nothing to do for long; 2^31 ms is the most
Order = tuple[str, tuple[Any, ...]]


class LeadingEngine(Engine):
    """The first rank's engine: an `Engine` that takes the others along. Call `close` at the end."""

    followers: tuple[Follower, ...] = ()

    def submit(
        self, prompt_ids: list[int], params: SamplingParams, request_id: str | None = None, priority: int = 0
    ) -> str:
        """See `Engine.submit`; what chance decides is decided here, for all ranks."""
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(62))
        request_id = super().submit(prompt_ids, params, request_id, priority)
        self._orders().append(("submit", (list(prompt_ids), params, request_id, priority)))
        return request_id

    def cancel(self, request_id: str) -> None:
        """See `Engine.cancel`."""
        super().cancel(request_id)
        self._orders().append(("cancel", (request_id,)))

    def step(self, waiting: AbstractContextManager[object] | None = None) -> list[TokenEvent]:
        """See `Engine.step`."""
        self._send([*self._orders(), ("step", ())])
        return super().step(waiting)

    def logits(self, token_ids: list[int]) -> Iterator[torch.Tensor]:
        """See `Engine.logits`; take all chunks, as the other ranks do."""
        self._check_prompt(token_ids, "logits")
        self._send([*self._orders(), ("logits", (list(token_ids),))])
        yield from super().logits(token_ids)

    def close(self) -> None:
        """See `Engine.close`: the other ranks end."""
        for follower in self.followers:
            follower.may_end = True
        self._send([("close", ())])
        super().close()
        distributed.destroy_process_group()
        for follower in self.followers:
            follower.process.wait(timeout=60)

    def _orders(self) -> list[Order]:
        return self.__dict__.setdefault("_waiting_orders", [])

    def _send(self, orders: list[Order]) -> None:
        distributed.broadcast_object_list([orders], src=0)
        self._orders().clear()


class Follower:
    """Another rank's process, tied to this one: when either ends, so does the other. A rank that is waited for in vain
    would hold this one, and its GPU's memory, until `STEP_TIMEOUT` or `IDLE_TIMEOUT`."""

    def __init__(self, command: list[str]) -> None:
        self.may_end = False
        self.process = subprocess.Popen(command, cwd=REPOSITORY_ROOT, stdin=subprocess.PIPE, stdout=sys.stderr)
        _in_background(self._end_with_it)

    def kill(self) -> None:
        """End it at once, but not this process."""
        self.may_end = True
        self.process.kill()

    def _end_with_it(self) -> None:
        code = self.process.wait()
        if not self.may_end:
            log.critical("a rank of this engine ended with code %d; this process ends as well", code)
            os._exit(1)


def end_with_the_first() -> None:
    """In another rank's process: end when the first rank's has gone, which closes this one's standard input."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    _in_background(wait)


def _in_background(work: Callable[[], None]) -> None:
    threading.Thread(target=work, daemon=True).start()


def follow(engine: Engine) -> None:
    """Do what the first rank's engine does until it closes."""
    while True:
        received: list[Any] = [None]
        distributed.broadcast_object_list(received, src=0)
        for name, arguments in received[0]:
            if name == "close":
                engine.close()
                distributed.destroy_process_group()
                return
            result = getattr(engine, name)(*arguments)
            if name == "logits":
                for _ in result:
                    pass


def join(rank: int, size: int, address: str, tensors_over: str = "nccl") -> Shards:
    """Meet the other ranks at `address`; orders go over gloo."""
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=size, timeout=IDLE_TIMEOUT)
    return Shards(rank, size, distributed.new_group(backend=tensors_over, timeout=STEP_TIMEOUT))


def load_leading_engine(engine_dir: Path, limits: EngineLimits, size: int, kv_fallback: str | None = None) -> Engine:
    """Start the other ranks on this host's GPUs and load the first. NibbleError when there are too few GPUs."""
    from nibble.runtime.load import load_rank

    found = torch.cuda.device_count()
    if found < size:
        raise NibbleError(
            f"tensor_parallel: got {size}, allowed up to {found}, the GPUs of this host; lower it in the model's recipe"
        )
    port = _free_port()
    command = [sys.executable, "-m", "nibble.runtime.parallel", "--engine", str(engine_dir), "--port", str(port)]
    command += ["--size", str(size), "--limits", json.dumps(asdict(limits)), "--kv-fallback", kv_fallback or ""]
    followers = tuple(Follower([*command, "--rank", str(rank)]) for rank in range(1, size))
    torch.cuda.set_device(0)
    try:
        engine = load_rank(engine_dir, limits, kv_fallback, join(0, size, f"tcp://127.0.0.1:{port}"), LeadingEngine)
    except BaseException:
        for follower in followers:
            follower.kill()
        raise
    assert isinstance(engine, LeadingEngine)
    engine.followers = followers
    return engine


def main() -> None:
    """One of the other ranks."""
    from nibble.runtime.load import load_rank

    parser = argparse.ArgumentParser(prog="python -m nibble.runtime.parallel", description="A rank beside the first.")
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--limits", required=True, help="JSON of EngineLimits")
    parser.add_argument("--kv-fallback", default="")
    options = parser.parse_args()
    end_with_the_first()
    torch.cuda.set_device(options.rank)
    shards = join(options.rank, options.size, f"tcp://127.0.0.1:{options.port}")
    limits = EngineLimits(**json.loads(options.limits))
    follow(load_rank(options.engine, limits, options.kv_fallback or None, shards, Engine))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
