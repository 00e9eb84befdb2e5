"""Keeping a server up: Triton never restarts a dead stub and goes on calling itself healthy, so this does.

A failed server is killed and started anew, not reloaded: its clients' connections break, which tells them at once,
where a reload would leave their streams silent. A server that keeps failing is given up.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from types import FrameType

from rich.console import Console

from nibble.errors import NibbleError
from serve.leftovers import ServerRecord
from serve.processes import ProcessIdentity
from serve.server import TritonServer
from serve.settings import ServeSettings

WATCH_S = 0.25
MAX_RESTARTS = 5
RESTART_WINDOW_S = 300.0


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
    """Owns one server from start to stop. Use as a context manager: leaving it stops the server."""

    def __init__(self, settings: ServeSettings, console: Console, stop: StopRequest) -> None:
        self._settings = settings
        self._console = console
        self._stop = stop
        self._server = TritonServer(settings)
        self._restarts: deque[float] = deque(maxlen=MAX_RESTARTS)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._server.is_running:
            self._console.print("stopping; running answers may end (Ctrl-C again: stop now)")
            ended = self._server.stop(self._stop.is_forced)
            self._console.print("stopped" if ended else "[yellow]the server did not end in time and was killed[/]")
        self._settings.record_path.unlink(missing_ok=True)

    def start(self) -> bool:
        """Start the server and wait until it serves. False when asked to stop meanwhile. Raises NibbleError."""
        began = time.monotonic()
        self._write_record(None)
        self._write_record(self._server.start())
        with self._console.status("starting Triton") as status:
            for doing in self._server.wait_ready():
                status.update(f"starting Triton, {time.monotonic() - began:.0f} s: {doing or 'launching'}")
                if self._stop.is_set:
                    return False
        self._console.print(f"[green]ready[/] after {time.monotonic() - began:.1f} s")
        return True

    def watch(self) -> None:
        """Return when asked to stop. Restarts a failed server. Raises NibbleError when it keeps failing."""
        while not self._stop.wait(WATCH_S):
            reason = self._server.failure()
            if reason is None:
                continue
            self._console.print(f"[red]{reason}[/]; log: {self._settings.log_path}", soft_wrap=True)
            self._restart(reason)

    def _restart(self, reason: str) -> None:
        now = time.monotonic()
        if len(self._restarts) == MAX_RESTARTS and now - self._restarts[0] < RESTART_WINDOW_S:
            raise NibbleError(
                f"gave up after {MAX_RESTARTS} restarts in {RESTART_WINDOW_S:.0f} s: {reason}; "
                f"see {self._settings.log_path}"
            )
        self._restarts.append(now)
        self._server.kill()
        self._settings.log_path.replace(self._settings.log_path.with_suffix(".previous.log"))
        self._console.print("restarting the server")
        self.start()

    def _write_record(self, server: ProcessIdentity | None) -> None:
        ServerRecord(
            name=self._settings.name,
            http_port=self._settings.http_port,
            shm_prefix=self._settings.shm_prefix,
            supervisor=ProcessIdentity.of(os.getpid()),
            server=server,
        ).write(self._settings.record_path)
