"""The front as a process of its own beside Triton: a crash of one leaves the other standing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable

from nibble.paths import REPOSITORY_ROOT
from serve.processes import ProcessIdentity, die_with_parent, kill_group
from serve.settings import FrontOptions, ServeSettings

STOP_MARGIN_S = 3.0


class FrontProcess:
    """Starts, watches and stops `serve.front.run`."""

    def __init__(self, settings: ServeSettings, options: FrontOptions) -> None:
        self._settings = settings
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> ProcessIdentity:
        """Start it. Call from the thread that outlives it."""
        self._process = subprocess.Popen(
            command_line(self._settings, self._options),
            cwd=REPOSITORY_ROOT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509  one prctl, no locks
        )
        return ProcessIdentity.of(self._process.pid)

    def failure(self) -> str | None:
        """Why it no longer serves, or None."""
        if self._process is None or self._process.poll() is None:
            return None
        return f"the OpenAI front ended with code {self._process.returncode}"

    def stop(self, is_forced: Callable[[], bool] = lambda: False) -> None:
        """Let running answers end within the drain time, then end it."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + self._settings.drain_timeout_s + STOP_MARGIN_S
            while self._process.poll() is None and time.monotonic() < deadline and not is_forced():
                time.sleep(0.05)
        kill_group(self._process.pid)
        self._process.wait()


def command_line(settings: ServeSettings, options: FrontOptions) -> list[str]:
    """The front's command for this server."""
    values = {
        "--triton": f"{settings.client_host}:{settings.grpc_port}",
        "--host": options.host,
        "--port": options.port,
        "--models": ",".join(settings.triton_models),
        "--drain-timeout": settings.drain_timeout_s,
        "--record": settings.record_path,
        **({"--log": settings.requests_path} if settings.requests_path else {}),
    }
    given = [str(part) for pair in values.items() for part in pair]
    return [sys.executable, "-m", "serve.front.run", *given, *options.arguments]
