"""Print what `scripts/setup.sh` installs, read from pyproject.toml so that each requirement is written once.

The repository itself is not installed (see pyproject.toml), so pip can't be asked for `.[dev]`.

    python scripts/requirements.py torch          torch's exact pin, which is installed first and alone
    python scripts/requirements.py dev gpu        the dependencies, then those of the extras named
    python scripts/requirements.py no-deps        packages to install with --no-deps
    python scripts/requirements.py image gpu      the dependencies that serving needs, then those of the extras named
    python scripts/requirements.py launcher       those that starting TensorRT-LLM's server needs beside torch
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def torch_pin() -> str:
    """The line of constraints.txt that pins torch."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if re.match(r"torch==", line))


def requirements(extras: list[str]) -> list[str]:
    """Dependencies of the library, then those of each extra. Exits with the allowed names for an unknown extra."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    ours = settings["tool"]["nibblekv"]
    dependencies = settings["project"]["dependencies"]
    if extras == ["no-deps"]:
        return ours["no-deps"]
    if extras and extras[0] in ("image", "launcher"):
        wanted, extras = ours[extras[0]], extras[1:]
        dependencies = [line for line in dependencies if re.split(r"[\[><=]", line)[0] in wanted]
    optional = settings["project"]["optional-dependencies"]
    for extra in extras:
        if extra not in optional:
            sys.exit(f"EXTRAS: got {extra!r}, allowed {', '.join(sorted(optional))}")
    return dependencies + [line for extra in extras for line in optional[extra]]


if __name__ == "__main__":
    print("\n".join([torch_pin()] if sys.argv[1:] == ["torch"] else requirements(sys.argv[1:])))
