"""Checks before a start: everything that would otherwise make Triton hang or die without saying why.

A stub whose libraries are missing makes tritonserver wait for ever, so `ldd` is asked first and the Debian package is
named. Ports and the engine folder are checked for the same reason: the answer must come at once and say what to do.
"""

from __future__ import annotations

import errno
import re
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from nibble.errors import NibbleError
from nibble.manifest import MANIFEST_FILE
from serve import wheel
from serve.settings import ServeSettings

DEBIAN_PACKAGES = {
    "libexpat.so.1": "libexpat1",
    "libz.so.1": "zlib1g",
    "libstdc++.so.6": "libstdc++6",
    "libgcc_s.so.1": "libgcc-s1",
}
OLD_SYSTEM = re.compile(r"version [`'](GLIBC(?:XX)?_[\d.]+)' not found")
NO_LIBRARY = re.compile(r"^\s*(\S+) => not found", re.MULTILINE)
LIBPYTHON = re.compile(r"libpython(\d\.\d+)\.so")


def check(settings: ServeSettings) -> None:
    """Raise NibbleError when this server can't start: wrong numpy, missing libraries, ports taken."""
    check_numpy(version("numpy"))
    for binary in (wheel.server_binary(), wheel.backend_library(), wheel.stub_binary()):
        check_libraries(binary)
    for endpoint, port in settings.ports.items():
        check_port(settings.address(endpoint), port, endpoint)
    if settings.front is not None:
        check_port(settings.front.host, settings.front.port, "OpenAI front")


def check_engine(directory: Path, build_command: str) -> None:
    """Raise NibbleError naming the build command when the folder holds no manifest."""
    if not (directory / MANIFEST_FILE).is_file():
        raise NibbleError(f"engine: {directory} holds no built engine; run `{build_command}` first")


def check_numpy(installed: str) -> None:
    """Raise NibbleError for numpy 2: the stub was compiled for numpy 1 and takes its strides for 0, so that strings
    arrive as garbage and end the stub."""
    if int(installed.partition(".")[0]) >= 2:
        raise NibbleError(
            f"numpy: got {installed} in {sys.prefix}, Triton's stub needs numpy 1; run `make setup` or "
            "`pip install numpy==1.26.4`"
        )


def check_libraries(binary: Path) -> None:
    """Raise NibbleError naming each shared library that `binary` lacks and the Debian package that has it."""
    found = subprocess.run(
        ["ldd", str(binary)], env=wheel.server_environment(), capture_output=True, text=True, check=False
    )
    problem = missing_libraries(found.stdout + found.stderr)
    if problem:
        raise NibbleError(f"Triton can't start: {binary.name} {problem}")


def missing_libraries(ldd_output: str) -> str | None:
    """What ldd says is missing and how to get it, or None."""
    if too_new := OLD_SYSTEM.search(ldd_output):
        return f"needs {too_new[1]}, which this system's C library lacks; use Debian 12, Ubuntu 22.04 or newer"
    missing = sorted(set(NO_LIBRARY.findall(ldd_output)))
    if not missing:
        return None
    return f"lacks {', '.join(missing)}; {_remedy(missing)}"


def check_port(host: str, port: int, endpoint: str) -> None:
    """Raise NibbleError when nothing can listen on host:port."""
    if not 1 <= port <= 65535:
        raise NibbleError(f"port: got {port} for {endpoint}, allowed 1 to 65535; use --port")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise NibbleError(
                f"port {port} ({endpoint}) is in use on {host}; stop the server there or take other ports with "
                f"--port N (PORT=N with make): http N, grpc N+1, metrics N+2, OpenAI front N+3"
            ) from error
        raise NibbleError(
            f"can't listen on {host}:{port} ({endpoint}): {error.strerror}; check --host and --port"
        ) from error


def _remedy(libraries: list[str]) -> str:
    packages = sorted({_debian_package(name) for name in libraries} - {""})
    if packages == ["libpython3.12"]:
        return (
            "Debian 12 has no package for it: use Python 3.11, or a Python 3.12 built with --enable-shared "
            f"(this one: {sys.executable})"
        )
    if packages:
        return f"run `apt-get install {' '.join(packages)}` as root"
    return "find its package with `apt-file search`"


def _debian_package(library: str) -> str:
    python = LIBPYTHON.match(library)
    return f"libpython{python[1]}" if python else DEBIAN_PACKAGES.get(library, "")
