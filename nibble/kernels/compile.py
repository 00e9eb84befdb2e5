"""Compile kernels ahead of time, and check what the compiler says about them. Needs no GPU.

python -m nibble.kernels.compile --arch sm_90a                 # everything
python -m nibble.kernels.compile --arch sm_90a --head-dim 128  # one model's head size
python -m nibble.kernels.compile --check                       # all architectures; fails on spills or registers
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor

from rich.console import Console

from nibble.errors import NibbleError
from nibble.kernels.compiler import ARCHITECTURES, KernelSource, cache_dir, compile_kernel
from nibble.kernels.instances import SPILL_LIMIT, all_sources


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 1 when --check found something, 2 when a kernel does not compile."""
    options = _parse(arguments)
    console = Console()
    jobs = [
        (source, architecture, registers)
        for architecture in options.arch or ARCHITECTURES
        for source, registers in all_sources(architecture)
        if options.head_dim in (None, dict(source.defines).get("HEAD_DIM"))
    ]
    try:
        with ProcessPoolExecutor(options.jobs) as pool:
            complaints = [complaint for complaint in pool.map(complaint_about, jobs) if complaint]
    except NibbleError as error:
        console.print(f"[red]{error}[/red]")
        return 2
    for complaint in complaints:
        console.print(f"[red]{complaint}[/red]")
    console.print(f"{len(jobs)} kernels compiled into {cache_dir()}")
    return 1 if options.check and complaints else 0


def complaint_about(job: tuple[KernelSource, str, int]) -> str | None:
    """Compile one kernel; what is wrong with its registers or spills, if anything."""
    source, architecture, max_registers = job
    cubin = compile_kernel(source, architecture)
    if cubin.spill_bytes > SPILL_LIMIT or cubin.registers > max_registers:
        return (
            f"{source.title} for {architecture}: {cubin.registers} registers (allowed {max_registers}), "
            f"{cubin.spill_bytes} bytes spilled (allowed {SPILL_LIMIT})"
        )
    return None


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nibble.kernels.compile", description="Compile the CUDA kernels.")
    parser.add_argument("--arch", nargs="*", choices=ARCHITECTURES, help="GPU architectures; all of them by default")
    parser.add_argument("--head-dim", type=int, help="only this head size")
    parser.add_argument("--check", action="store_true", help="fail when a kernel spills or uses too many registers")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers that run side by side")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
