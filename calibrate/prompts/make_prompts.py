"""Compose the calibration prompts from the texts in data/: the same file, byte for byte, at every run.

Scales come from what these prompts make a model compute, so they are meant to look like what people send: short and
long, many languages, code, numbers, tables, JSON.

    python -m calibrate.prompts.make_prompts            # writes prompts.jsonl next to this file
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

from calibrate.prompts.categories import CATEGORIES

FOLDER = Path(__file__).parent
SEED = 20261130


@dataclass(frozen=True)
class Row:
    """One line of prompts.jsonl."""

    id: str
    category: str
    language: str
    source: str
    licence: str
    text: str


def make_rows() -> list[Row]:
    """All rows, mixed so that any run of them has most categories."""
    rows = []
    for category in CATEGORIES:
        name = category.__name__
        for number, draft in enumerate(category(random.Random(f"{SEED} {name}")), start=1):
            rows.append(Row(f"{name}-{number:03d}", name, *draft))
    random.Random(SEED).shuffle(rows)
    return rows


def main() -> None:
    """Write prompts.jsonl."""
    rows = make_rows()
    lines = [json.dumps(asdict(row), ensure_ascii=False) for row in rows]
    (FOLDER / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"prompts.jsonl: {len(rows)} prompts")


if __name__ == "__main__":
    main()
