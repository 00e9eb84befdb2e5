"""The soak's own server: `serve.run` as a child process, its processes, their memory, and how they are killed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nibble.errors import NibbleError
from nibble.paths import REPOSITORY_ROOT, engine_dir
from serve.leftovers import ServerRecord
from serve.processes import ProcessIdentity, stubs_of
from serve.settings import ServeSettings

START_S = 300.0
PORTS = (20_000, 32_000)
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass
class SoakServer:
    """A running server of one engine. Use as a context manager: leaving it stops the server."""

    model: str
    kv: str
    port: int
    arguments: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def __enter__(self) -> SoakServer:
        command = [sys.executable, "-m", "serve.run", "--model", self.model, "--kv", self.kv]
        command += ["--port", str(self.port), "--certificate", "warn", *self.arguments]
        self.process = subprocess.Popen(
            command, cwd=REPOSITORY_ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        self.wait_ready()
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)

    @property
    def settings(self) -> ServeSettings:
        return ServeSettings(f"{self.model}-{self.kv}", engine_dir(self.model, self.kv), http_port=self.port)

    @property
    def front_url(self) -> str:
        return f"http://127.0.0.1:{self.port + 3}"

    @property
    def record(self) -> ServerRecord:
        record = ServerRecord.read(self.settings.record_path)
        if record is None:
            raise NibbleError(f"soak: the server on port {self.port} has gone; see {self.settings.run_dir}")
        return record

    def is_ready(self) -> bool:
        """What /health/ready says."""
        try:
            with urllib.request.urlopen(f"{self.front_url}/health/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def answers(self) -> bool:
        """Ask for a token. A queue that is full is a sign of life as well."""
        fields = {"model": self.model, "prompt": "1 2 3", "max_tokens": 1}
        request = urllib.request.Request(
            f"{self.front_url}/v1/completions", json.dumps(fields).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as error:
            return bool(json.loads(error.read())["error"]["code"] == "queue_full")
        except OSError:
            return False

    def wait_ready(self) -> float:
        """Seconds until the server is ready. Raises NibbleError when it never is."""
        began = time.monotonic()
        while not self.is_ready():
            assert self.process is not None
            if self.process.poll() is not None or time.monotonic() - began > START_S:
                raise NibbleError(f"soak: the server is not ready; see {self.settings.log_path}")
            time.sleep(0.05)
        return time.monotonic() - began

    def victim(self, name: str) -> ProcessIdentity:
        """The process of a name: stub, server or front."""
        record = self.record
        assert record.server is not None and record.front is not None
        return {"server": record.server, "front": record.front}.get(name) or stubs_of(record.server.pid)[0]

    def recover_from(self, name: str, number: signal.Signals, *, until_answered: bool = True) -> float:
        """Send a signal to one process; seconds from it until another is there, ready, and has answered a request.

        until_answered: False under load, where a request would first wait for those of others, and where readiness is
        never stale, since their failures make the front look at once.
        """
        victim = self.victim(name)
        began = time.monotonic()
        os.kill(victim.pid, number)
        while (
            victim.is_alive
            or not self._is_replaced(name, victim)
            or not self.is_ready()
            or (until_answered and not self.answers())
        ):
            if time.monotonic() - began > START_S:
                raise NibbleError(f"soak: no recovery from {number.name} to the {name} within {START_S:.0f} s")
            time.sleep(0.05)
        return time.monotonic() - began

    def memory_mib(self) -> dict[str, float]:
        """Resident memory of each process, without what it shares with files."""
        return {name: _anonymous_mib(self.victim(name).pid) for name in ("server", "stub", "front")}

    def metric(self, name: str) -> float:
        """The sum of a metric of the engine. name: a regular expression of its name, with or without labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port + 2}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        return sum(float(value) for value in re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE))

    def _is_replaced(self, name: str, victim: ProcessIdentity) -> bool:
        try:
            return self.victim(name) != victim
        except (NibbleError, AssertionError, IndexError):
            return False


def free_port() -> int:
    """A port with three free ones after it, below those that the system gives to outgoing connections.

    A client that keeps asking for a port on which nobody listens would otherwise, sooner or later, be given that very
    port as its own end, connect to itself, and keep the restarted server from listening there.
    """
    while True:
        port = random.randrange(*PORTS, 4)  # noqa: S311
        if all(_is_free(port + offset) for offset in range(4)):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def _anonymous_mib(pid: int) -> float:
    match = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(match[1]) / 1024 if match else 0.0
