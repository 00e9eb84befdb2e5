"""Tokens to text as they come: whole characters only, and never a piece of a stop string."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def text_decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """Token ids to text, special tokens left out.

    Straight from the tokenizer's library where transformers adds nothing to it: its way takes three times as long, and
    every token of every stream goes through here twice.
    """
    if getattr(type(tokenizer), "_decode", None) is PreTrainedTokenizerFast._decode:
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
    return partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class TextStream:
    """Feed it tokens; it returns the text that has become certain.

    decode: token ids to text, special tokens left out. Text is decoded from a window of recent tokens, as a token's
    text can depend on those before it (a leading space, a character spread over tokens).
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: tuple[str, ...] = ()) -> None:
        self._decode = decode
        self._stop = stop
        self._tokens: list[int] = []
        self._window_start = 0
        self._read_to = 0
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text made certain by one more token; sets `stopped` when a stop string is complete."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._window_start : self._read_to])
        after = self._decode(self._tokens[self._window_start :])
        if after.endswith(UNFINISHED) and len(self._tokens) - self._read_to < 8:
            return ""
        self._window_start, self._read_to = self._read_to, len(self._tokens)
        return self._release(after[len(before) :])

    def flush(self) -> str:
        """What was held back, at the end of an answer that no stop string ended."""
        before = self._decode(self._tokens[self._window_start : self._read_to])
        after = self._decode(self._tokens[self._window_start :])
        rest = "" if self.stopped else self._held + after[len(before) :]
        self._held, self._read_to = "", len(self._tokens)
        return rest

    def _release(self, text: str) -> str:
        if not self._stop:
            return text
        text = self._held + text
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
