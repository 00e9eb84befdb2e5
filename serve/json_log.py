"""Structured logs: one JSON object a line, for the supervisor's events and for each request of the front.

    {"time": "2026-01-01T00:00:00.000Z", "event": "request", "request_id": "...", "status": 200, ...}

Nothing that a user wrote or a model answered is logged, only counts, times, names and error messages. A log file is
rotated, so that a server that is left alone does not fill its disk.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

MAX_BYTES = 10 << 20
KEPT_FILES = 3


class JsonLog:
    """Writes events to a file, or to standard output for path None."""

    def __init__(self, path: Path | None) -> None:
        self._logger = logging.Logger("nibble")  # not in logging's registry: two logs never share handlers
        self._handler = _file_handler(path) if path else logging.StreamHandler(sys.stdout)
        self._logger.addHandler(self._handler)

    def write(self, event: str, **fields: Any) -> None:
        """One line. Fields that are None are left out."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        known = {name: value for name, value in fields.items() if value is not None}
        self._logger.info(json.dumps({"time": now, "event": event, **known}, ensure_ascii=True))

    def close(self) -> None:
        self._handler.close()


def _file_handler(path: Path) -> logging.Handler:
    path.parent.mkdir(parents=True, exist_ok=True)
    return RotatingFileHandler(path, maxBytes=MAX_BYTES, backupCount=KEPT_FILES, encoding="utf-8")
