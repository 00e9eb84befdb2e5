"""One tritonserver process: started from the wheel, waited for, stopped.

It leads its own process group, so that Ctrl-C reaches only the supervisor, and the kernel ends it when the supervisor
dies. Its log goes to a file, not a pipe: a pipe's end would die with the supervisor.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

from nibble.errors import NibbleError
from serve import server_log, wheel
from serve.leftovers import remove_shared_memory
from serve.processes import ProcessIdentity, die_with_parent, kill_group, stubs_of
from serve.settings import ServeSettings

POLL_S = 0.1
STOP_MARGIN_S = 5.0  # what Triton takes to end after its own drain time
ADMIN_HEADER = "x-nibble-admin"
ADMIN_APIS = "model-repository,shared-memory,trace,logging"  # what only the holder of admin.key may do


class TritonServer:
    """A running tritonserver. `start` returns at once; `wait_ready` raises when it can't become ready."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._stubs: list[ProcessIdentity] = []
        self._admin_key = ""

    def start(self) -> ProcessIdentity:
        """Start the process. Call from the thread that outlives it (the kernel watches the thread)."""
        remove_shared_memory(self._settings.shm_prefix)
        wheel.install_backends(self._settings.backends_dir)
        self._admin_key = secrets.token_hex(24)
        _write_secret(self._settings, self._admin_key)
        with self._settings.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command_line(self._settings, self._admin_key),
                env=wheel.server_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509  one prctl, no locks
            )
        return ProcessIdentity.of(self._process.pid)

    def wait_ready(self) -> Iterator[str]:
        """Yield what the model is doing, a few times a second, until it serves. Raises NibbleError with the reason."""
        deadline = time.monotonic() + self._settings.start_timeout_s
        while not (self._answers_ready() and self._listens(self._settings.metrics_port)):
            self._raise_on_failure(time.monotonic() > deadline)
            yield server_log.progress(self._settings.log_path)
            time.sleep(POLL_S)
        self._stubs = stubs_of(self._pid)

    def failure(self) -> str | None:
        """Why this server no longer serves, or None. A dead stub leaves Triton's own health at 200 for ever."""
        if self._process is None or self._process.poll() is not None:
            return f"tritonserver ended with code {self._process.returncode if self._process else None}"
        if not self._stubs or not all(stub.is_alive for stub in self._stubs):
            self._stubs = stubs_of(self._pid)
            if len(self._stubs) < self._count_ready():  # fewer are right after an engine was swapped or unloaded
                return "the model's process (Triton's Python stub) died"
        return None

    def stop(self, is_forced: Callable[[], bool] = lambda: False) -> bool:
        """Let running answers end, then stop; kill what outlives the drain time. True when it ended by itself."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self._settings.drain_timeout_s + STOP_MARGIN_S
        while self._process.poll() is None and time.monotonic() < deadline and not is_forced():
            time.sleep(POLL_S)
        ended = self._process.poll() is not None
        self.kill()
        return ended

    def kill(self) -> None:
        """End the process, its stubs and its shared memory now."""
        if self._process is not None:
            kill_group(self._process.pid)
            self._process.wait()
        remove_shared_memory(self._settings.shm_prefix)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def _pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def _answers_ready(self) -> bool:
        url = f"http://{self._settings.client_host}:{self._settings.http_port}/v2/health/ready"
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _count_ready(self) -> int:
        """How many engines Triton holds to be ready; 1 when it doesn't answer, so that no stub is too few."""
        url = f"http://{self._settings.client_host}:{self._settings.http_port}/v2/repository/index"
        request = urllib.request.Request(url, b'{"ready": true}', {ADMIN_HEADER: self._admin_key})  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=2) as answer:  # noqa: S310
                return len(json.load(answer))
        except (OSError, ValueError):
            return 1

    def _listens(self, port: int) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((self._settings.client_host, port)) == 0

    def _raise_on_failure(self, is_late: bool) -> None:
        reason = server_log.failure_reason(self._settings.log_path)
        has_ended = self._process is None or self._process.poll() is not None
        if not (reason or has_ended or is_late):
            return
        if reason is None and is_late:
            reason = f"not ready after {self._settings.start_timeout_s:.0f} s"
        reason = reason or "it ended without saying why; its log ends with\n" + server_log.tail(self._settings.log_path)
        self.kill()
        raise NibbleError(f"Triton did not start: {reason}\nfull log: {self._settings.log_path}")


def command_line(settings: ServeSettings, admin_key: str) -> list[str]:
    """tritonserver and its options. Auto-complete is off: it would start the stub a second time.

    Model control is explicit, for a live fallback, and asks for the admin key: whoever may load a model may run code.
    """
    endpoints = [
        option
        for name, port in settings.ports.items()
        for option in (f"--{name}-address={settings.address(name)}", f"--{name}-port={port}")
    ]
    return [
        str(wheel.server_binary()),
        f"--model-repository={settings.models_dir}",
        f"--backend-directory={settings.backends_dir}",
        f"--backend-config=python,shm-region-prefix-name={settings.shm_prefix}",
        f"--exit-timeout-secs={max(1, int(settings.drain_timeout_s))}",
        "--disable-auto-complete-config",
        "--model-control-mode=explicit",
        *(f"--load-model={name}" for name in settings.triton_models),
        f"--http-restricted-api={ADMIN_APIS}:{ADMIN_HEADER}={admin_key}",
        f"--grpc-restricted-protocol={ADMIN_APIS}:{ADMIN_HEADER}={admin_key}",
        *_trace_options(settings.trace),
        "--allow-gpu-metrics=false",
        *endpoints,
    ]


def _trace_options(trace: str | None) -> list[str]:
    if trace is None:
        return []
    if trace.startswith(("http://", "https://")):
        where = ["mode=opentelemetry", f"opentelemetry,url={trace}"]
    else:
        where = ["mode=triton", f"triton,file={trace}"]
    return [f"--trace-config={option}" for option in (*where, "rate=1", "level=TIMESTAMPS")]


def _write_secret(settings: ServeSettings, admin_key: str) -> None:
    """admin.key, readable by this user alone."""
    settings.admin_key_path.unlink(missing_ok=True)
    with os.fdopen(os.open(settings.admin_key_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(admin_key)
