"""Triton from the nvidia-pytriton wheel: where its parts lie and the environment they need.

The wheel is used as a box of binaries, not through its Python API. Two of its habits are designed round here: the
Python backend comes without the stub of any Python version, and the stub's libraries are found through paths relative
to the wheel. So a backend directory is assembled for each server, and `LD_LIBRARY_PATH` names the libraries.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

from nibble.atomic import new_directory
from nibble.errors import NibbleError

STUB_NAME = "triton_python_backend_stub"


def triton_root() -> Path:
    """The wheel's tritonserver folder. Raises NibbleError when the wheel is not installed."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise NibbleError(
            f"Triton: {sys.executable} has no nvidia-pytriton; run `make setup` (it installs the wheel with --no-deps)"
        )
    return Path(spec.origin).parent / "tritonserver"


def server_binary() -> Path:
    """tritonserver itself."""
    return triton_root() / "bin" / "tritonserver"


def backend_library() -> Path:
    """Triton's Python backend."""
    return triton_root() / "backends" / "python" / "libtriton_python.so"


def stub_binary() -> Path:
    """The stub of the running Python version. Raises NibbleError when the wheel has none."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stubs = triton_root() / "python_backend_stubs"
    if not (stubs / version / STUB_NAME).is_file():
        allowed = ", ".join(sorted(path.name for path in stubs.iterdir()))
        raise NibbleError(
            f"Triton: got Python {version}, the wheel has stubs for {allowed}; NibbleKV needs 3.11 or 3.12"
        )
    return stubs / version / STUB_NAME


def library_path() -> str:
    """Value of LD_LIBRARY_PATH: the wheel's libraries, then the folder of this Python's own libpython."""
    folders = [triton_root().parent.parent / "nvidia_pytriton.libs"]
    libpython = Path(sysconfig.get_config_var("LIBDIR") or "") / (sysconfig.get_config_var("INSTSONAME") or "")
    if ".so" in libpython.name and libpython.is_file():
        folders.append(libpython.parent)
    inherited = os.environ.get("LD_LIBRARY_PATH")
    return os.pathsep.join([*map(str, folders), *([inherited] if inherited else [])])


def server_environment() -> dict[str, str]:
    """Environment of tritonserver. The stub takes its Python home from the first `python3` on PATH: ours."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, "PATH": path, "LD_LIBRARY_PATH": library_path(), "TOKENIZERS_PARALLELISM": "false"}


def install_backends(target: Path) -> None:
    """Write a backend directory (library, Python utilities, stub) to `target`, whole or not at all.

    It is written anew for each start: a server changes its stub to mode 0100, which nobody else could copy or check.
    """
    with new_directory(target) as workspace:
        folder = workspace / "python"
        folder.mkdir()
        source = backend_library().parent
        for name in (backend_library().name, "triton_python_backend_utils.py"):
            shutil.copyfile(source / name, folder / name)
        shutil.copyfile(stub_binary(), folder / STUB_NAME)
        (folder / STUB_NAME).chmod(0o755)
