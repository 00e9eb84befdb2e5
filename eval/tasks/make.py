"""Writes the data of the offline tasks: `python -m eval.tasks.make`. Everything is our own text, from a seed.

Each task is a YAML file in lm-evaluation-harness's form and a JSONL file beside it, so that the same files serve the
harness and `eval.suite`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
DOCUMENTS = 48
WORDS = (
    "amber apple anchor basket beacon bottle branch bridge bucket button candle canyon carpet castle cedar chapel "
    "cherry copper cotton cradle desert dragon engine falcon feather fiddle forest garden ginger hammer harbor helmet "
    "island jacket kettle ladder lantern lemon marble meadow mirror needle orchard paddle pepper pillow pocket rabbit "
    "ribbon saddle salmon shadow silver spider stable summer temple thunder timber tunnel valley velvet window winter"
).split()
NAMES = "Ann Ben Clara David Emma Frank Grace Henry Iris Jack Kate Leo Mary Noah Olive Paul Rose Sam Tom Vera".split()
TOWNS = "Bath Derby Dover Exeter Leeds Lincoln London Oxford Reading Ripon Wells York".split()
OPPOSITES = (
    "hot cold, big small, up down, fast slow, light dark, happy sad, old new, long short, open closed, early late, "
    "rich poor, hard soft, high low, loud quiet, full empty, wet dry, strong weak, thick thin, near far, left right, "
    "day night, black white, good bad, first last"
)
FILLER = (
    "The road went on between the hedges.",
    "Nobody came to the mill that afternoon.",
    "A little rain fell, and then it was dry again.",
    "The bread was cut and the tea was poured.",
    "Two boats lay in the harbour, one of them empty.",
    "He counted the steps and lost count at thirty.",
    "The letters were read aloud after supper.",
    "In the evening the windows were shut.",
)
Document = dict[str, Any]


def copy(generator: random.Random, index: int) -> Document:
    """A line to repeat; two shown first."""
    lines = [" ".join(generator.sample(WORDS, 8)) for _ in range(3)]
    shown = "".join(f"Line: {line}\nCopy: {line}\n\n" for line in lines[:2])
    return {"text": f"{shown}Line: {lines[2]}\nCopy:", "target": lines[2]}


def arithmetic(generator: random.Random, index: int) -> Document:
    """A sum with four answers to choose from."""
    first, second = generator.randint(2, 49), generator.randint(2, 49)
    right = first + second
    wrong = generator.sample([right + step for step in (-10, -3, -2, -1, 1, 2, 3, 10) if right + step > 0], 3)
    return choices(generator, f"2 + 3 = 5\n10 + 7 = 17\n{first} + {second} =", f" {right}", [f" {n}" for n in wrong])


def as_json(generator: random.Random, index: int) -> Document:
    """Facts to be written as JSON; two shown first."""
    people = [(name, generator.randint(18, 80), generator.choice(TOWNS)) for name in generator.sample(NAMES, 3)]
    asked = [f"Facts: {name} is {age} years old and lives in {town}.\nJSON:" for name, age, town in people]
    answers = [json.dumps({"name": name, "age": age, "town": town}) for name, age, town in people]
    shown = "".join(f"{question} {answer}\n\n" for question, answer in zip(asked[:2], answers[:2], strict=True))
    return {"text": shown + asked[2], "target": answers[2]}


def opposites(generator: random.Random, index: int) -> Document:
    """A cloze with four words to choose from."""
    pairs = [tuple(pair.split()) for pair in OPPOSITES.split(", ")]
    left, right = pairs[index % len(pairs)][:: 1 if index < len(pairs) else -1]
    wrong = [generator.choice(pair) for pair in generator.sample([p for p in pairs if right not in p], 3)]
    return choices(generator, f"The opposite of {left} is", f" {right}", [f" {word}" for word in wrong])


def retrieval(generator: random.Random, index: int) -> Document:
    """One of five codes, told somewhere in about a thousand tokens."""
    told = [(word, str(generator.randint(1000, 9999))) for word in generator.sample(WORDS, 5)]
    sentences = [generator.choice(FILLER) for _ in range(90)]
    for word, code in told:
        sentences.insert(generator.randrange(len(sentences)), f"The code of {word} is {code}.")
    word, code = told[0]
    return {"text": " ".join(sentences) + f"\n\nThe code of {word} is", "target": code}


def counting(generator: random.Random, index: int) -> Document:
    """A row of numbers to go on with: one slip and the rest is wrong."""
    start, step = generator.randint(1, 20), generator.randint(1, 5)
    row = [str(start + step * at) for at in range(30)]
    return {"text": "Count on in equal steps: " + ", ".join(row[:10]) + ",", "target": ", ".join(row[10:25])}


def choices(generator: random.Random, text: str, right: str, wrong: list[str]) -> Document:
    """A question with shuffled answers; label: the place of the right one."""
    shuffled = generator.sample([right, *wrong], 4)
    return {"text": text, "choices": shuffled, "label": shuffled.index(right)}


MAKERS: dict[str, Callable[[random.Random, int], Document]] = {
    "copy": copy,
    "arithmetic": arithmetic,
    "json": as_json,
    "opposites": opposites,
    "retrieval": retrieval,
    "counting": counting,
}


def make(name: str) -> str:
    """The JSONL of one task."""
    generator = random.Random(name)
    return "".join(json.dumps(MAKERS[name](generator, index)) + "\n" for index in range(DOCUMENTS))


def main() -> None:
    """Write every task's data."""
    for name in MAKERS:
        (FOLDER / f"{name}.jsonl").write_text(make(name), encoding="utf-8")


if __name__ == "__main__":
    main()
