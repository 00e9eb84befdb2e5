"""SHA-256 of files, remembered by path, size and modification time.

An engine is bound to its weights by hash, and weights are too big to hash at every start; so what was hashed once is
kept in engines/.cache/hashes.json and used while the file looks untouched.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nibble import atomic
from nibble.paths import engines_root


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file, read in full."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def json_sha256(value: Any) -> str:
    """Hex SHA-256 of a value in canonical JSON (sorted keys, no spaces)."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def files_sha256(paths: Iterable[Path]) -> str:
    """One hash for several files: over their names and their (remembered) hashes, in name order."""
    return json_sha256(sorted((path.name, remembered_sha256(path)) for path in paths))


def remembered_sha256(path: Path) -> str:
    """Hex SHA-256 of a file; read again only when its size or modification time changed."""
    path = path.resolve()
    status, memory_file = path.stat(), engines_root() / ".cache" / "hashes.json"
    memory, stamp = _read_memory(memory_file), [status.st_size, status.st_mtime_ns]
    known = memory.get(str(path))
    if isinstance(known, dict) and known.get("stamp") == stamp:
        return str(known["sha256"])
    digest = file_sha256(path)
    memory[str(path)] = {"stamp": stamp, "sha256": digest}
    with contextlib.suppress(OSError):  # engines/ may be mounted read-only: then it is hashed anew at each start
        atomic.write_text(memory_file, json.dumps(memory, indent=1, sort_keys=True))
    return digest


def _read_memory(path: Path) -> dict[str, Any]:
    """What is remembered; a missing or damaged file only costs time."""
    try:
        memory = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError):
        return {}
    return memory if isinstance(memory, dict) else {}
