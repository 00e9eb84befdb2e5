"""The shipped prompt set: a thousand different prompts of every kind, each with a licence, none of the eval text."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from calibrate.prompts.categories import CATEGORIES
from calibrate.prompts.make_prompts import FOLDER, Row, make_rows

ROOT = Path(__file__).resolve().parents[2]
LINES = (FOLDER / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
ROWS = [Row(**json.loads(line)) for line in LINES]
COUNTS = {
    "chat": 132,
    "code": 160,
    "maths": 110,
    "summarising": 98,
    "writing": 24,
    "long_document": 100,
    "multilingual": 234,
    "structured": 57,
    "extraction": 43,
    "role_play": 42,
}
LANGUAGES = {"ar", "de", "en", "es", "fr", "hi", "it", "ja", "ko", "nl", "pl", "pt", "ru", "zh"}


def test_a_thousand_in_all_categories() -> None:
    assert len(ROWS) == 1000
    assert Counter(row.category for row in ROWS) == COUNTS
    assert set(COUNTS) == {category.__name__ for category in CATEGORIES}


def test_no_two_are_alike() -> None:
    assert len({row.id for row in ROWS}) == 1000
    assert len({"".join(row.text.lower().split()) for row in ROWS}) == 1000


def test_languages() -> None:
    assert {row.language for row in ROWS} == LANGUAGES
    assert min(Counter(row.language for row in ROWS).values()) >= 18


def test_each_has_a_source_and_a_free_licence() -> None:
    assert {row.licence for row in ROWS} == {"Apache-2.0", "PSF-2.0", "public domain"}
    assert all(row.source and row.text.strip() == row.text for row in ROWS)


def test_lengths_spread() -> None:
    sizes = sorted(len(row.text) for row in ROWS)
    assert sizes[0] < 40
    assert sum(size < 200 for size in sizes) > 200
    assert sum(size > 8_000 for size in sizes) >= 80  # about 2,000 tokens
    assert sizes[-1] > 20_000
    assert (FOLDER / "prompts.jsonl").stat().st_size < 6_000_000


def test_any_part_of_the_file_is_mixed() -> None:
    for start in range(0, 1000, 100):
        assert len({row.category for row in ROWS[start : start + 100]}) >= 8


def test_the_generator_writes_the_committed_file() -> None:
    assert make_rows() == ROWS


@pytest.mark.parametrize("novel", ["emma", "persuasion"])
def test_no_paragraph_is_evaluated_on(novel: str) -> None:
    text = (ROOT / "eval" / "data" / f"{novel}.txt").read_text(encoding="utf-8")
    evaluated = {paragraph for paragraph in text.split("\n\n") if len(paragraph) > 60}
    prompted = {paragraph for row in ROWS for paragraph in row.text.split("\n\n")}
    assert len(evaluated) > 500
    assert not evaluated & prompted


def test_readme_counts() -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    counts = {**COUNTS, **Counter(row.licence for row in ROWS)}
    assert all(f"| {name} | {count} |" in readme for name, count in counts.items())
