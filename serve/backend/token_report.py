"""What a client learns of each token on request: its text, its bytes, its log-probability and the likeliest others.

A token of a byte-level vocabulary may be a piece of a character. Its text is then shown with a replacement character
and `bytes` has what it really is, so that a client can join tokens to the exact text.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nibble.runtime import TokenEvent
from nibble.runtime.text import UNFINISHED

_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}


class TokenReport:
    """Describes token events of one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._token = lru_cache(maxsize=1 << 16)(lambda token_id: describe_token(tokenizer, token_id))

    def __call__(self, event: TokenEvent) -> dict[str, Any]:
        """One event with a token as {token, bytes, logprob, top: [{token, bytes, logprob}]}, likeliest first."""
        top = event.top_logprobs or {}
        return {
            **self._token(event.token_id),
            "logprob": event.logprob,
            "top": [{**self._token(token_id), "logprob": logprob} for token_id, logprob in top.items()],
        }


def describe_token(tokenizer: PreTrainedTokenizerBase, token_id: int) -> dict[str, Any]:
    """The text and the bytes of one token."""
    text = str(tokenizer.decode([token_id]))
    if UNFINISHED not in text:
        return {"token": text, "bytes": list(text.encode())}
    stored = str(tokenizer.convert_ids_to_tokens(token_id))
    if all(character in _BYTE_OF for character in stored):
        return {"token": text, "bytes": [_BYTE_OF[character] for character in stored]}
    return {"token": text, "bytes": list(text.encode())}
