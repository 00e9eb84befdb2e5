"""What the soak asks: prompts with a tag of their own, and the kinds of good and bad behaviour of clients.

A prompt repeats its tag, so a small model repeats it too: greedy answers are known from a quiet run before the soak
(`golden`), and a tag of somebody else in an answer would show two requests mixed up.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

MAX_TOKENS = 32
TAGS = 16
LONG_REPEATS = 100


class Kind(StrEnum):
    """One behaviour of a client."""

    STREAM = "stream"
    WHOLE = "whole"
    STOP_STRING = "stop string"
    LONG = "long prompt"
    CANCEL = "cancel"
    HANG_UP = "hang up"
    MALFORMED = "malformed"
    INVALID_UTF8 = "invalid UTF-8"
    OVERSIZED = "oversized body"
    TOO_LONG = "prompt over the context"
    BAD_VALUE = "bad value"


WEIGHTS = {
    Kind.STREAM: 8,
    Kind.WHOLE: 4,
    Kind.STOP_STRING: 3,
    Kind.LONG: 8,
    Kind.CANCEL: 2,
    Kind.HANG_UP: 1,
    Kind.MALFORMED: 1,
    Kind.INVALID_UTF8: 1,
    Kind.OVERSIZED: 0.3,
    Kind.TOO_LONG: 0.5,
    Kind.BAD_VALUE: 1,
}
REFUSED = {  # kinds that must be refused: status and code
    Kind.MALFORMED: (400, "invalid_json"),
    Kind.INVALID_UTF8: (400, "invalid_json"),
    Kind.OVERSIZED: (413, "request_too_large"),
    Kind.TOO_LONG: (400, "context_length_exceeded"),
    Kind.BAD_VALUE: (400, "invalid_value"),
}


@dataclass(frozen=True)
class Prompt:
    """A prompt and the tag in it."""

    tag: str
    text: str


@dataclass(frozen=True)
class Task:
    """One request to make. max_tokens: how long its answer is, exactly."""

    kind: Kind
    prompt: Prompt
    max_tokens: int


def make_prompts(seed: int, count: int = TAGS, long_repeats: int = LONG_REPEATS) -> list[Prompt]:
    """Every other prompt is short, the others repeat their tag up to `long_repeats` times: lengths that fill a pool."""
    source = random.Random(seed)  # noqa: S311
    tags: dict[str, None] = {}
    while len(tags) < count:
        tags["".join(source.choice("BCDFGKLMNPRSTVZ") + source.choice("aeiou") for _ in range(3))] = None
    lengths = [10, long_repeats, 10, long_repeats * 2 // 3, 10, long_repeats // 3]
    return [Prompt(tag, " ".join([tag] * lengths[index % len(lengths)])) for index, tag in enumerate(tags)]


def make_task(source: random.Random, prompts: list[Prompt], max_tokens: int = MAX_TOKENS) -> Task:
    """The next request of a client, for 4 to `max_tokens` tokens."""
    (kind,) = source.choices(list(WEIGHTS), list(WEIGHTS.values()))
    of_kind = [prompt for prompt in prompts if (len(prompt.text) > 200) == (kind is Kind.LONG)]
    return Task(kind, source.choice(of_kind), source.randint(4, max_tokens))
