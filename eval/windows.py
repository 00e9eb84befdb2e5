"""Windows of real text: the same tokens for both engines, chosen by a seed and known by a hash.

A window is `window_tokens` tokens that the engines read, and one more that only the last position has to predict.
Windows never overlap and never straddle two texts. They are taken in turn from every text, so that a short run reads
all of them. Where the tokenizer starts a text with a BOS token, every window starts with one: without it the model
would never see its own attention sink.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from eval.needle_words import Language, make_haystack
from eval.records import Inputs, TextRecord
from nibble.errors import NibbleError

TEXT_FOLDER = Path(__file__).parent / "data"
MIN_WINDOW_TOKENS = 16

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Window:
    """One window: which text, the first token's offset in it, and the token ids (`window_tokens` + 1 of them)."""

    text: str
    start: int
    token_ids: tuple[int, ...]

    @property
    def inputs(self) -> list[int]:
        """The tokens that the engines read."""
        return list(self.token_ids[:-1])

    @property
    def next_tokens(self) -> list[int]:
        """For every input, the token that follows it."""
        return list(self.token_ids[1:])

    @property
    def sha256(self) -> str:
        return hashlib.sha256(",".join(map(str, self.token_ids)).encode()).hexdigest()


@dataclass(frozen=True)
class Text:
    """A text file's name and contents."""

    name: str
    contents: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.contents.encode()).hexdigest()


@dataclass(frozen=True)
class WindowSet:
    """What both engines read: the windows, the texts they are from, the token every window begins with (or None)."""

    windows: list[Window]
    texts: list[Text]
    bos: int | None

    @property
    def positions(self) -> int:
        return sum(len(window.inputs) for window in self.windows)

    @property
    def sha256(self) -> str:
        """One hash for all windows in their order."""
        return hashlib.sha256("\n".join(window.sha256 for window in self.windows).encode()).hexdigest()

    @property
    def record(self) -> Inputs:
        taken = Counter(window.text for window in self.windows)
        texts = [TextRecord(name=text.name, sha256=text.sha256, windows=taken[text.name]) for text in self.texts]
        return Inputs(sha256=self.sha256, bos=self.bos, texts=texts)


def choose_windows(
    tokenizer: Any, *, count: int, window_tokens: int, seed: int, folder: Path = TEXT_FOLDER
) -> WindowSet:
    """Read the folder's texts and cut windows with a transformers tokenizer; NibbleError as in `cut_windows`.

    A model that reads the needle language alone gets haystacks of it, one a window.
    """
    language = Language.of(tokenizer)
    texts = read_texts(folder) if language is None else [_haystacks(language, count, window_tokens + 1, seed)]
    bos = starting_token(tokenizer)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    windows = cut_windows(texts, encode, count=count, window_tokens=window_tokens, seed=seed, bos=bos)
    return WindowSet(windows, texts, bos)


def _haystacks(language: Language, count: int, tokens: int, seed: int) -> Text:
    haystacks = [make_haystack(language, "multikey", tokens, seed + number) for number in range(count)]
    return Text(f"needle language, seed {seed}", "\n".join(language.text(each.tokens) for each in haystacks))


def count_words(tokenizer: Any, windows: list[Window]) -> int:
    """Words that the predicted tokens make, as lm-eval counts them: what white space separates."""
    return sum(len(re.split(r"\s+", tokenizer.decode(window.next_tokens).strip())) for window in windows)


def starting_token(tokenizer: Any) -> int | None:
    """The BOS id when the tokenizer puts it before every text, else None."""
    bos = tokenizer.bos_token_id
    return bos if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else None


def read_texts(folder: Path = TEXT_FOLDER) -> list[Text]:
    """Every *.txt of the folder in name order; NibbleError when there is none."""
    texts = [Text(path.name, path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.txt"))]
    if not texts:
        raise NibbleError(f"evaluation texts: got none in {folder}, allowed one or more *.txt files; put one there")
    return texts


def cut_windows(
    texts: list[Text],
    encode: Encode,
    *,
    count: int,
    window_tokens: int,
    seed: int,
    bos: int | None = None,
) -> list[Window]:
    """`count` windows of `window_tokens` + 1 tokens; the same arguments give the same windows.

    NibbleError when a number is out of range or the texts are too short.
    """
    if count < 1 or window_tokens < MIN_WINDOW_TOKENS:
        raise NibbleError(
            f"windows: got {count} of {window_tokens} tokens, allowed 1 or more of at least {MIN_WINDOW_TOKENS}"
        )
    shuffle = random.Random(seed).sample
    by_text = [_windows_of(text, encode(text.contents), window_tokens + 1, bos) for text in texts]
    shuffled = [shuffle(windows, len(windows)) for windows in by_text]
    in_turn = [window for turn in zip_longest(*shuffled) for window in turn if window is not None]
    if len(in_turn) < count:
        raise NibbleError(
            f"windows: got {count} of {window_tokens} tokens, but the {len(texts)} texts hold only {len(in_turn)} such "
            f"windows; ask for at most {len(in_turn)}, make them shorter, or add text to eval/data"
        )
    return in_turn[:count]


def _windows_of(text: Text, token_ids: list[int], length: int, bos: int | None) -> list[Window]:
    prefix = () if bos is None else (bos,)
    step = length - len(prefix)
    starts = range(0, len(token_ids) - step + 1, step)
    return [Window(text.name, start, prefix + tuple(token_ids[start : start + step])) for start in starts]
