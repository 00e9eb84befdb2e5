"""From CUDA source to a cubin with NVRTC, kept on disk. No GPU and no CUDA header is needed.

A cubin is kept under a key of everything that shapes it: the source and all headers beside it, the flags, the
architecture and the compiler's version. It is written beside its place and renamed, so that processes may race.

| environment variable | meaning | default |
|---|---|---|
| NIBBLE_KERNEL_CACHE | folder of compiled kernels | ~/.cache/nibble/kernels |
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from nibble.atomic import write_bytes, write_text
from nibble.errors import NibbleError

SOURCE_DIR = Path(__file__).parent / "cuda"
ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")


@dataclass(frozen=True)
class KernelSource:
    """A source file of `cuda/` with the macros that make one instance of it."""

    file: str
    defines: tuple[tuple[str, int], ...] = ()

    @property
    def title(self) -> str:
        return " ".join([self.file, *(f"{name}={value}" for name, value in self.defines)])


@dataclass(frozen=True)
class Cubin:
    """Machine code of one instance, and the worst of what ptxas reports of its kernels."""

    code: bytes
    registers: int
    spill_bytes: int


def compile_kernel(source: KernelSource, architecture: str) -> Cubin:
    """The cubin, from the cache when it is there. NibbleError carries the compiler's log."""
    if architecture not in ARCHITECTURES:
        raise NibbleError(f"GPU architecture: got {architecture!r}, allowed {', '.join(ARCHITECTURES)}")
    flags = (f"--gpu-architecture={architecture}", "--std=c++17", "--ptxas-options=-v", *_define_flags(source))
    place = cache_dir() / _cache_key(source, flags)
    if (place / "report.json").exists():
        report = json.loads((place / "report.json").read_text())
        return Cubin((place / "kernel.cubin").read_bytes(), **report)
    cubin = _compile(source, flags)
    write_bytes(place / "kernel.cubin", cubin.code)
    write_text(place / "report.json", json.dumps({"registers": cubin.registers, "spill_bytes": cubin.spill_bytes}))
    return cubin


def cache_dir() -> Path:
    """The folder of compiled kernels."""
    return Path(os.environ.get("NIBBLE_KERNEL_CACHE", "~/.cache/nibble/kernels")).expanduser()


def architecture_of(capability: tuple[int, int]) -> str:
    """The architecture to compile for on a GPU of that compute capability."""
    names = {
        (8, 0): "sm_80",
        (8, 6): "sm_80",
        (8, 9): "sm_89",
        (9, 0): "sm_90a",
        (10, 0): "sm_100a",
        (12, 0): "sm_120a",
    }
    if capability not in names:
        raise NibbleError(
            f"GPU of compute capability {capability[0]}.{capability[1]}: the kernels support "
            f"{', '.join(f'{major}.{minor}' for major, minor in names)}; use another GPU or the CPU backend"
        )
    return names[capability]


def _define_flags(source: KernelSource) -> tuple[str, ...]:
    return tuple(f"-D{name}={value}" for name, value in source.defines)


def _cache_key(source: KernelSource, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for part in (source.file, *flags, str(_nvrtc_version())):
        digest.update(part.encode() + b"\0")
    for name, text in _sources().items():
        if name == source.file or name.endswith(".cuh"):
            digest.update(name.encode() + b"\0" + text + b"\0")
    return f"{Path(source.file).stem}-{digest.hexdigest()[:32]}"


@lru_cache
def _sources() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(SOURCE_DIR.glob("*.cu*"))}


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise NibbleError(
            "CUDA kernels need cuda-bindings and nvidia-cuda-nvrtc, which are not installed: "
            'run `make setup EXTRAS="dev gpu"`'
        ) from error
    return nvrtc


@lru_cache
def _nvrtc_version() -> tuple[int, int]:
    error, major, minor = _nvrtc().nvrtcVersion()
    return (int(major), int(minor)) if int(error) == 0 else (0, 0)


def _compile(source: KernelSource, flags: tuple[str, ...]) -> Cubin:
    nvrtc = _nvrtc()
    headers = {name: text for name, text in _sources().items() if name.endswith(".cuh")}
    _, program = nvrtc.nvrtcCreateProgram(
        _sources()[source.file],
        source.file.encode(),
        len(headers),
        list(headers.values()),
        [name.encode() for name in headers],
    )
    try:
        options = [flag.encode() for flag in flags]
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _program_log(nvrtc, program)
        if int(error) != 0:
            raise NibbleError(f"NVRTC could not compile {source.title} with {' '.join(flags)}:\n{log}")
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        code = bytearray(size)
        nvrtc.nvrtcGetCUBIN(program, code)
        return Cubin(bytes(code), *_read_report(log))
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _program_log(nvrtc: Any, program: Any) -> str:
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    return log.rstrip(b"\0").decode()


def _read_report(log: str) -> tuple[int, int]:
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
    spills = [int(count) for count in re.findall(r"(\d+) bytes spill", log)]
    stack = [int(count) for count in re.findall(r"(\d+) bytes stack frame", log)]
    return max(registers, default=0), max([*spills, *stack], default=0)
