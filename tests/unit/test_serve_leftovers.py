"""After a kill: orphans are ended, shared memory and records go, living servers are left alone."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve import leftovers
from serve.leftovers import ServerRecord, sweep
from serve.processes import ProcessIdentity, kill_group, stubs_of

GONE = ProcessIdentity(pid=2**22 + 1, started=1)


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", folder)
    return folder


@pytest.fixture
def sleeper() -> Iterator[ProcessIdentity]:
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield ProcessIdentity.of(process.pid)
    kill_group(process.pid)
    process.wait()


def write_record(root: Path, **fields: object) -> Path:
    path = root / "tiny-int4-8000" / "server.json"
    values = {"name": "tiny-int4", "http_port": 8000, "shm_prefix": "nibble_x_", "supervisor": GONE, **fields}
    ServerRecord(**values).write(path)  # type: ignore[arg-type]
    return path


def test_record_round_trip(tmp_path: Path) -> None:
    path = write_record(tmp_path, server=GONE)
    assert ServerRecord.read(path) == ServerRecord("tiny-int4", 8000, "nibble_x_", GONE, GONE)


def test_orphan_is_ended_and_its_shared_memory_removed(
    tmp_path: Path, shared_memory: Path, sleeper: ProcessIdentity
) -> None:
    (shared_memory / "nibble_x_1").touch()
    (shared_memory / "nibble_y_1").touch()
    path = write_record(tmp_path, server=sleeper)
    (said,) = sweep(tmp_path)
    assert "ended its tritonserver, 1 shared memory regions" in said
    assert not sleeper.is_alive
    assert [region.name for region in shared_memory.iterdir()] == ["nibble_y_1"]
    assert not path.exists()


def test_living_server_is_left_alone(tmp_path: Path, shared_memory: Path, sleeper: ProcessIdentity) -> None:
    (shared_memory / "nibble_x_1").touch()
    path = write_record(tmp_path, supervisor=ProcessIdentity.of(os.getpid()), server=sleeper)
    assert sweep(tmp_path) == []
    assert sleeper.is_alive
    assert path.exists()
    assert list(shared_memory.iterdir())


def test_reused_process_id_is_not_killed(tmp_path: Path, shared_memory: Path, sleeper: ProcessIdentity) -> None:
    write_record(tmp_path, server=ProcessIdentity(sleeper.pid, sleeper.started - 1))
    sweep(tmp_path)
    assert sleeper.is_alive


@pytest.mark.parametrize("content", ["", "{", "[]", '{"name": "x"}'])
def test_broken_record_is_removed(tmp_path: Path, shared_memory: Path, content: str) -> None:
    path = write_record(tmp_path)
    path.write_text(content)
    assert sweep(tmp_path) == []
    assert not path.exists()


def test_identity_of_a_dead_process(sleeper: ProcessIdentity) -> None:
    assert sleeper.is_alive
    kill_group(sleeper.pid)
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not sleeper.is_alive, "a zombie is dead"
    with pytest.raises(ProcessLookupError):
        ProcessIdentity.of(GONE.pid)


def test_only_stub_processes_are_stubs() -> None:
    assert stubs_of(os.getpid()) == []
