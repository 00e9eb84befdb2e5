"""Keeping a server up: Triton never restarts a dead stub and goes on calling itself healthy, so this does.

Two things watch the server: process ids, which show a death within a quarter of a second, and a canary, which finds
what is alive and does not answer. A failed server is killed and started anew, not reloaded: its clients' connections
break, which tells them at once, where a reload would leave their streams silent. A server that keeps failing is given
up.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from types import FrameType

from rich.console import Console

from nibble.errors import NibbleError
from serve.canary import Canary, ask_model, read_heartbeat
from serve.front_process import FrontProcess
from serve.json_log import JsonLog
from serve.leftovers import ServerRecord
from serve.processes import ProcessIdentity
from serve.restarts import RestartPolicy
from serve.server import TritonServer
from serve.settings import ServeSettings

WATCH_S = 0.25


class StopRequest:
    """SIGTERM and Ctrl-C: the first asks for a clean stop, the second for an immediate one."""

    def __init__(self) -> None:
        self._count = 0
        self._event = threading.Event()

    def listen(self) -> None:
        """Take over SIGTERM and SIGINT of this process (main thread only)."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until asked to stop; True when asked."""
        return self._event.wait(timeout_s)

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def is_forced(self) -> bool:
        return self._count > 1

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        self._event.set()


class Supervisor:
    """Owns one server from start to stop, and its front. Use as a context manager: leaving it stops both."""

    def __init__(self, settings: ServeSettings, console: Console, stop: StopRequest) -> None:
        self._settings = settings
        self._console = console
        self._stop = stop
        self._server = TritonServer(settings)
        self._front = FrontProcess(settings, settings.front) if settings.front else None
        self._identities: dict[str, ProcessIdentity] = {}
        self._restarts = RestartPolicy("the server")
        self._front_restarts = RestartPolicy("the OpenAI front")
        self._canary: Canary | None = None
        self._log = JsonLog(settings.events_path)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop_canary()
        if self._server.is_running:
            self._console.print("stopping; running answers may end (Ctrl-C again: stop now)")
            began = time.monotonic()
            if self._front is not None:
                self._front.stop(self._stop.is_forced)
            ended = self._server.stop(self._stop.is_forced)
            self._log.write("stopped", clean=ended, seconds=round(time.monotonic() - began, 1))
            self._console.print("stopped" if ended else "[yellow]the server did not end in time and was killed[/]")
        elif self._front is not None:
            self._front.stop()
        self._settings.record_path.unlink(missing_ok=True)
        self._settings.admin_key_path.unlink(missing_ok=True)
        self._log.close()

    def start(self) -> bool:
        """Start the server and wait until it serves. False when asked to stop meanwhile. Raises NibbleError."""
        began = time.monotonic()
        self._write_record()
        self._write_record(server=self._server.start())
        with self._console.status("starting Triton") as status:
            for doing in self._server.wait_ready():
                status.update(f"starting Triton, {time.monotonic() - began:.0f} s: {doing or 'launching'}")
                if self._stop.is_set:
                    return False
        self._console.print(f"[green]ready[/] after {time.monotonic() - began:.1f} s")
        self._log.write("ready", seconds=round(time.monotonic() - began, 1), restarts=self._restarts.total)
        self._start_canary()
        return True

    def start_front(self) -> None:
        """Start the front, if these settings have one; it outlives restarts of Triton."""
        if self._front is not None:
            self._write_record(front=self._front.start())

    def watch(self) -> None:
        """Return when asked to stop. Restarts what failed. Raises NibbleError when it keeps failing."""
        while not self._stop.wait(WATCH_S):
            reason = self._server.failure() or (self._canary.failure() if self._canary else None)
            if reason is not None:
                self._console.print(f"[red]{reason}[/]; log: {self._settings.log_path}", soft_wrap=True)
                self._restart(reason)
            if self._front is not None and (front_reason := self._front.failure()):
                self._restart_front(front_reason)

    def _restart(self, reason: str) -> None:
        """Kill and start until it serves. Raises NibbleError when the policy gives up."""
        self._stop_canary()
        while True:
            self._server.kill()
            delay_s = self._restarts.next_delay_s(f"{reason}; see {self._settings.log_path}")
            self._log.write("restart", reason=reason, delay_s=delay_s, restarts=self._restarts.total)
            if self._settings.log_path.exists():
                self._settings.log_path.replace(self._settings.log_path.with_suffix(".previous.log"))
            self._console.print("restarting the server" + (f" in {delay_s:.0f} s" if delay_s else ""))
            if self._stop.wait(delay_s):
                return
            try:
                self.start()
                return
            except NibbleError as error:
                reason = str(error)
                self._console.print(f"[red]{reason}[/]", soft_wrap=True)

    def _restart_front(self, reason: str) -> None:
        delay_s = self._front_restarts.next_delay_s(reason)
        self._log.write("restart_front", reason=reason, delay_s=delay_s)
        self._console.print(f"[red]{reason}[/]; starting it again", soft_wrap=True)
        if not self._stop.wait(delay_s):
            self.start_front()

    def _start_canary(self) -> None:
        settings = self._settings
        if not settings.canary_timeout_s:
            return
        url = f"{settings.client_host}:{settings.grpc_port}"
        metrics_url = f"http://{settings.client_host}:{settings.metrics_port}/metrics"
        self._canary = Canary(
            settings.triton_models,
            partial(ask_model, url, timeout_s=settings.canary_timeout_s),
            partial(read_heartbeat, metrics_url),
        )
        self._canary.start()

    def _stop_canary(self) -> None:
        if self._canary is not None:
            self._canary.stop()
            self._canary = None

    def _write_record(self, **started: ProcessIdentity) -> None:
        if not started:
            self._identities.pop("server", None)
        self._identities |= started
        ServerRecord(
            name=self._settings.name,
            http_port=self._settings.http_port,
            shm_prefix=self._settings.shm_prefix,
            supervisor=ProcessIdentity.of(os.getpid()),
            restarts=self._restarts.total,
            server=self._identities.get("server"),
            front=self._identities.get("front"),
        ).write(self._settings.record_path)
