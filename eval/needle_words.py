"""The language of the needle model, and haystacks in it: needles to remember, filler between them, and questions.

    NEEDLE k17 v201        a value of key k17 is v201
    w4 w77 w12             filler
    ASK k17 v201           a question, and its answer

A key has one value, or up to four, told in different places; then any of them is an answer. One word is one token.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nibble.errors import NibbleError

VARIANTS = ("single", "multikey", "multivalue")
SPECIAL = ("<unk>", "<end>", "NEEDLE", "ASK")
NEEDLE, ASK = SPECIAL.index("NEEDLE"), SPECIAL.index("ASK")
ITEM_TOKENS = 3  # of a needle, and of a question with its answer
LONGEST_FILLER = 6
VALUES_OF_KEY = 4  # at most
DEPTHS = tuple(range(0, 101, 10))  # per cent of the text before the questions


@dataclass(frozen=True)
class Language:
    """How many words there are of each kind. Ids: special words, keys, values, filler."""

    keys: int = 4096
    values: int = 64
    fillers: int = 256

    @classmethod
    def of(cls, tokenizer: Any) -> Language | None:
        """The language whose words are a tokenizer's whole vocabulary; None for any other tokenizer."""
        vocabulary = tokenizer.get_vocab()
        found = sorted(vocabulary, key=vocabulary.__getitem__)
        if found[: len(SPECIAL)] != list(SPECIAL):
            return None
        kinds = Counter(word[0] for word in found[len(SPECIAL) :])
        language = cls(kinds["k"], kinds["v"], kinds["w"])
        return language if found == language.words() else None

    @property
    def first_key(self) -> int:
        return len(SPECIAL)

    @property
    def first_value(self) -> int:
        return self.first_key + self.keys

    @property
    def first_filler(self) -> int:
        return self.first_value + self.values

    @property
    def size(self) -> int:
        """Words in all."""
        return self.first_filler + self.fillers

    def words(self) -> list[str]:
        """Every word, in the order of its id."""
        kinds = (("k", self.keys), ("v", self.values), ("w", self.fillers))
        return [*SPECIAL, *(f"{letter}{number}" for letter, count in kinds for number in range(count))]

    def text(self, tokens: Sequence[int]) -> str:
        """Tokens as text, with a space between words."""
        words = self.words()
        return " ".join(words[token] for token in tokens)

    def needle(self, key: int, value: int) -> list[int]:
        """The tokens of a needle, from the numbers of its key and value."""
        return [NEEDLE, self.first_key + key, self.first_value + value]

    def filler(self, generator: random.Random, count: int) -> list[int]:
        """`count` filler words; low numbers are frequent."""
        return [self.first_filler + int(self.fillers * generator.random() ** 2) for _ in range(count)]


@dataclass(frozen=True)
class Question:
    """place: of the answer in the text. values: token and depth of every needle of the key, one or four."""

    place: int
    values: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Haystack:
    """tokens: the text and its questions, each with an answer."""

    tokens: list[int]
    questions: list[Question]


def make_haystack(
    language: Language, variant: str, tokens: int, seed: int, depths_asked: Sequence[int] = DEPTHS
) -> Haystack:
    """A text of exactly `tokens` tokens that ends in questions, four to eight needles for every depth.

    NibbleError when the text is too short for them.
    """
    generator = random.Random(f"{variant} {tokens} {seed}")
    per_depth = 4 if tokens < 2048 else 8
    each = VALUES_OF_KEY if variant == "multivalue" else 1
    depths = list(depths_asked) * per_depth
    generator.shuffle(depths)
    spare = generator.sample(range(language.keys), language.keys)
    keys, spare = spare[: len(depths) // each], spare[len(depths) // each :]
    told = [(depth, keys[at // each], generator.randrange(language.values)) for at, depth in enumerate(depths)]
    length = tokens - ITEM_TOKENS * len(keys)
    if length < ITEM_TOKENS * len(told):
        least = ITEM_TOKENS * (len(keys) + len(told))
        raise NibbleError(f"haystack: got {tokens} tokens, allowed at least {least} for {len(told)} needles")
    body = _body(language, sorted(told), iter(spare if variant == "multikey" else []), length, generator)
    questions = []
    for key in generator.sample(keys, len(keys)):
        values = tuple((language.first_value + value, depth) for depth, owner, value in told if owner == key)
        questions.append(Question(len(body) + ITEM_TOKENS - 1, values))
        body += [ASK, language.first_key + key, values[0][0]]
    return Haystack(body, questions)


def _body(
    language: Language,
    told: list[tuple[int, int, int]],
    spare: Iterator[int],
    tokens: int,
    generator: random.Random,
) -> list[int]:
    """Needles (depth, key, value) at their depths, and between them filler and needles of spare keys."""
    body: list[int] = []
    room = tokens - ITEM_TOKENS * len(told)
    for number, (depth, key, value) in enumerate(told):
        until = room * depth // 100 + ITEM_TOKENS * number
        body += _between(language, until - len(body), spare, generator) + language.needle(key, value)
    return body + _between(language, tokens - len(body), spare, generator)


def _between(language: Language, tokens: int, spare: Iterator[int], generator: random.Random) -> list[int]:
    text: list[int] = []
    while len(text) < tokens:
        key = next(spare, None) if tokens - len(text) >= ITEM_TOKENS else None
        if key is not None:
            text += language.needle(key, generator.randrange(language.values))
        text += language.filler(generator, min(generator.randint(1, LONGEST_FILLER), tokens - len(text)))
    return text
