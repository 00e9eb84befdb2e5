"""Which commit a bench measures: every record says so."""

from __future__ import annotations

import os
import subprocess

from nibble.paths import REPOSITORY_ROOT


def measured_commit() -> str:
    """NIBBLE_COMMIT where a copy of the repository has no git; else git's short name, with + when the tree differs."""
    if asked := os.environ.get("NIBBLE_COMMIT"):
        return asked
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, cwd=REPOSITORY_ROOT, capture_output=True, text=True, check=True).stdout.strip()
