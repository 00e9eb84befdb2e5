"""Damaged engines and full disks: what is wrong is found and named, and the next command works."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from build import run as build_run
from nibble.errors import NibbleError
from nibble.manifest import MANIFEST_FILE, read_manifest
from nibble.runtime import Engine
from nibble.stage import run_stage

REGIONS = 6
TMPFS_KB = 384


def build(model: Path, engines: Path) -> int:
    """The build stage's command in this process; its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NIBBLE_ENGINES", str(engines))
        patch.setattr(sys, "argv", ["build", "--model", str(model), "--kv", "int4"])
        with pytest.raises(SystemExit) as ended:
            run_stage(build_run.main)
    return int(str(ended.value.code))


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tiny model that these tests may damage."""
    folder = tmp_path_factory.mktemp("faults") / "tiny"
    shutil.copytree(tiny_llama_dir, folder)
    return folder


@pytest.fixture(scope="module")
def engine_dir(model: Path) -> Path:
    assert build(model, model.parent / "engines") == 0
    (folder,) = (model.parent / "engines").glob("*/int4")
    return folder


def test_a_flipped_byte_in_any_region_of_any_file_is_named(
    model: Path, engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIBBLE_ENGINES", str(model.parent / "engines"))
    files = [path for path in engine_dir.rglob("*") if path.is_file()]
    assert {MANIFEST_FILE, "kv_keys.safetensors"} <= {path.name for path in files}
    for path in [*files, *model.glob("*.safetensors"), model / "config.json"]:
        whole, times = path.read_bytes(), path.stat()
        for region in range(REGIONS):
            at = (len(whole) - 1) * region // (REGIONS - 1)
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x5A]) + whole[at + 1 :])
            with pytest.raises(NibbleError) as found:
                Engine.load(engine_dir)
            assert path.name in str(found.value) or path.parent.name in str(found.value), (path, at, str(found.value))
        path.write_bytes(whole)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    read_manifest(engine_dir).verify_weights(engine_dir)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own that is nearly full."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder = tmp_path / "disk"
    folder.mkdir()
    if libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, f"size={TMPFS_KB}k".encode()) != 0:
        pytest.skip(f"no file system can be mounted here: {errno.errorcode[ctypes.get_errno()]}")
    yield folder
    libc.umount2(str(folder).encode(), 2)


def test_a_full_disk_ends_a_build_with_its_reason_and_leaves_nothing_half(
    model: Path, small_disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * (TMPFS_KB - 16) * 1024)
    assert build(model, small_disk / "engines") == 2
    told = capfd.readouterr().err
    assert "no space left" in told.lower()
    assert "Traceback" not in told
    assert not list((small_disk / "engines").glob("*/int4"))
    filler.unlink()
    assert build(model, small_disk / "engines") == 0
