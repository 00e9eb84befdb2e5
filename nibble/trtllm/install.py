"""Puts one line into this Python's site-packages, so that every process started from it arms the bootstrap.

TensorRT-LLM runs its executor in worker processes of its own, started by MPI; a patch made in the parent is not there.
Python runs the lines of *.pth files at each start, and ours does nothing unless TLLM_NIBBLE_ENGINE is set.

    python3 -m nibble.trtllm.install --root /path/of/this/repository
"""

from __future__ import annotations

import argparse
import site
import sysconfig
from pathlib import Path

from nibble import atomic
from nibble.errors import NibbleError
from nibble.stage import console, run_stage

PTH = "nibble_trtllm.pth"


def pth_text(root: Path) -> str:
    """Two lines: the repository on the path, and a look at the environment before anything is imported."""
    arm = "__import__('nibble.trtllm.bootstrap').trtllm.bootstrap.arm()"
    return f"{root.resolve()}\nimport os; os.environ.get('TLLM_NIBBLE_ENGINE') and {arm}\n"


def install(root: Path, folder: Path | None = None) -> Path:
    """Write the file into site-packages (or `folder`). NibbleError when none can be written."""
    candidates = [folder] if folder else [Path(sysconfig.get_paths()["purelib"]), Path(site.getusersitepackages())]
    for candidate in candidates:
        try:
            atomic.write_text(candidate / PTH, pth_text(root))
        except OSError:
            continue
        return candidate / PTH
    raise NibbleError(
        f"can't write {PTH} into {' or '.join(map(str, candidates))}; run as the user whose Python runs TensorRT-LLM"
    )


def main() -> None:
    """Install for the Python that runs this."""
    parser = argparse.ArgumentParser(prog="python -m nibble.trtllm.install", description="Arm the bootstrap.")
    parser.add_argument("--root", type=Path, required=True, help="folder that holds the package nibble")
    console.print(f"{install(parser.parse_args().root)} arms our KV cache in every process of this Python")


if __name__ == "__main__":
    run_stage(main)
