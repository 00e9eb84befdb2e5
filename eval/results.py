"""Where a run is kept: a new folder each time, never an old one, and a link to the newest.

    results/<model>/<kv>/20261130T081500Z/  report.json, report.html, positions.jsonl
    results/<model>/<kv>/latest             symbolic link to the newest complete run
    results/<model>/<kv>/partial/           windows of runs that have not ended

`NIBBLE_RESULTS` moves the whole tree. A run is written in a hidden folder and renamed: a folder with a report is whole.
"""

from __future__ import annotations

import os
import shutil
from datetime import datetime
from pathlib import Path

from nibble.errors import NibbleError
from nibble.paths import REPOSITORY_ROOT


def results_root() -> Path:
    """The folder of all runs: `NIBBLE_RESULTS`, or results/ of the repository."""
    return Path(os.environ.get("NIBBLE_RESULTS") or REPOSITORY_ROOT / "results")


def results_dir(model: str, kv: str) -> Path:
    """The folder of all runs of a model and KV recipe."""
    return results_root() / model / kv


def partial_dir(model: str, kv: str) -> Path:
    """Where unfinished runs keep their windows."""
    return results_dir(model, kv) / "partial"


def store_run(folder: Path, created: datetime, files: dict[str, str | Path]) -> Path:
    """Write one run's files and move `latest` to it; returns the run's folder.

    files: contents by file name, or a Path to move there. NibbleError when there are 100 runs of the same second.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run = _claim(folder, created)
    workspace = folder / f".{run.name}.tmp"
    workspace.mkdir()
    for name, content in files.items():
        if isinstance(content, Path):
            shutil.move(content, workspace / name)
        else:
            (workspace / name).write_text(content, encoding="utf-8")
    workspace.rename(run)  # replaces the empty folder that was claimed
    _point_latest(folder, run)
    return run


def _claim(folder: Path, created: datetime) -> Path:
    """Make a folder nobody else has: the stamp, then the stamp with a number."""
    stamp = created.strftime("%Y%m%dT%H%M%SZ")
    for name in (stamp, *(f"{stamp}-{number}" for number in range(2, 101))):
        try:
            (folder / name).mkdir()
        except FileExistsError:
            continue
        return folder / name
    raise NibbleError(f"results: got 100 runs of {stamp} in {folder}, allowed fewer; wait a second and run again")


def _point_latest(folder: Path, run: Path) -> None:
    link = folder / f".latest.{os.getpid()}.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(run.name)
    link.replace(folder / "latest")
