"""Checks before a start: each says what is missing and what to do."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from nibble.errors import NibbleError
from serve import preflight, wheel

COMPLETE = """
	linux-vdso.so.1 (0x00007ffd)
	libz.so.1 => /lib/x86_64-linux-gnu/libz.so.1 (0x00007f28)
"""
LDD_CASES = [
    (COMPLETE, None),
    ("	libpython3.11.so.1.0 => not found\n", "apt-get install libpython3.11"),
    ("	libexpat.so.1 => not found\n	libz.so.1 => not found\n", "apt-get install libexpat1 zlib1g"),
    ("	libpython3.12.so.1.0 => not found\n", "--enable-shared"),
    ("	libodd.so.3 => not found\n", "lacks libodd.so.3; find its package"),
    ("stub: /lib/libc.so.6: version `GLIBC_2.38' not found (required by stub)", "needs GLIBC_2.38"),
]


@pytest.mark.parametrize(("output", "expected"), LDD_CASES)
def test_ldd_output(output: str, expected: str | None) -> None:
    found = preflight.missing_libraries(output)
    assert found is None if expected is None else expected in str(found)


def test_missing_library_names_the_binary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "missing_libraries", lambda output: "lacks libx.so")
    with pytest.raises(NibbleError, match=r"Triton can't start: true lacks libx\.so"):
        preflight.check_libraries(Path("/bin/true"))


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(NibbleError, match=rf"port {port} \(grpc\) is in use on 127.0.0.1; .*--port"):
            preflight.check_port("127.0.0.1", port, "grpc")


@pytest.mark.parametrize("port", [0, 65536])
def test_port_out_of_range(port: int) -> None:
    with pytest.raises(NibbleError, match="allowed 1 to 65535"):
        preflight.check_port("127.0.0.1", port, "http")


def test_address_that_is_not_ours() -> None:
    with pytest.raises(NibbleError, match=r"can't listen on 192\.0\.2\.1:18000"):
        preflight.check_port("192.0.2.1", 18000, "http")


def test_missing_engine_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(NibbleError, match="make engine MODEL=m KV=int4"):
        preflight.check_engine(tmp_path, "make engine MODEL=m KV=int4")


def test_numpy_2_is_refused() -> None:
    preflight.check_numpy("1.26.4")
    with pytest.raises(NibbleError, match=r"numpy: got 2\.4\.6"):
        preflight.check_numpy("2.4.6")


def test_missing_wheel_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NibbleError, match="make setup"):
        wheel.triton_root()


@pytest.fixture
def fake_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "tritonserver"
    for name in ("backends/python/libtriton_python.so", "backends/python/triton_python_backend_utils.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    stub = wheel_stub(root)
    stub.parent.mkdir(parents=True)
    stub.write_bytes(b"stub")
    monkeypatch.setattr(wheel, "triton_root", lambda: root)
    return root


def wheel_stub(root: Path) -> Path:
    version = f"{wheel.sys.version_info.major}.{wheel.sys.version_info.minor}"
    return root / "python_backend_stubs" / version / wheel.STUB_NAME


def test_backends_survive_a_stub_made_unreadable_by_an_earlier_server(fake_wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "backends"
    wheel.install_backends(target)
    (target / "python" / wheel.STUB_NAME).chmod(0o100)
    wheel.install_backends(target)
    assert (target / "python" / wheel.STUB_NAME).stat().st_mode & 0o777 == 0o755
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backends", "tritonserver"], "no leftovers"


def test_unknown_python_lists_the_wheels_stubs(fake_wheel: Path) -> None:
    wheel_stub(fake_wheel).parent.rename(fake_wheel / "python_backend_stubs" / "2.7")
    with pytest.raises(NibbleError, match=r"the wheel has stubs for 2\.7"):
        wheel.stub_binary()
