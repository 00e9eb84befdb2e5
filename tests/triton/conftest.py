"""A real server for the tests marked `triton`: SmolLM2 with an int4 cache, started once and shared.

The whole folder is skipped, with the reason, where Triton can't run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.soak.server import free_port
from nibble.paths import REPOSITORY_ROOT, engine_dir
from nibble.runtime import Engine
from tests.triton.running_server import KV, LIMITS, MODEL, RunningServer, serve_command


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.triton)
        if find_spec("pytriton") is None:
            item.add_marker(
                pytest.mark.skip(reason="nvidia-pytriton is not installed (make setup without SKIP_TRITON)")
            )


@pytest.fixture(scope="session")
def built_engine() -> Path:
    """The int4 engine of SmolLM2; built when it is not there."""
    command = [sys.executable, "-m", "build.run", "--model", MODEL, "--kv", KV]
    built = subprocess.run(command, cwd=REPOSITORY_ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return engine_dir(MODEL, KV)


@pytest.fixture(scope="session")
def start_server(
    built_engine: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., RunningServer]]:
    """Starts `serve.run` on a free port (or a given one); whatever still runs at the end is killed."""
    started: list[RunningServer] = []

    def start(*extra: str, port: int | None = None) -> RunningServer:
        port = port or free_port()
        output = tmp_path_factory.mktemp("serve") / "output.txt"
        with output.open("w") as stream:
            process = subprocess.Popen(
                serve_command(port, *extra),
                cwd=REPOSITORY_ROOT,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                text=True,
                env={key: value for key, value in os.environ.items() if key != "KV_FALLBACK"},
            )
        started.append(RunningServer(process, port, output))
        return started[-1]

    yield start
    for server in started:
        if server.process.poll() is None:
            server.terminate()
        shutil.rmtree(server.settings.run_dir, ignore_errors=True)


@pytest.fixture(scope="session")
def shared_servers() -> list[RunningServer]:
    """The newest is the shared server."""
    return []


@pytest.fixture
def server(start_server: Callable[..., RunningServer], shared_servers: list[RunningServer]) -> RunningServer:
    """The shared server, ready; a new one when a test has killed it."""
    if not shared_servers or shared_servers[-1].process.poll() is not None:
        shared_servers.append(start_server())
    shared_servers[-1].wait_ready()
    return shared_servers[-1]


@pytest.fixture(scope="session")
def engine(built_engine: Path) -> Engine:
    """The same engine in this process, to compare with."""
    return Engine.load(built_engine, LIMITS)
