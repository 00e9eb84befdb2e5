"""One request on its way through the engine: its tokens, its pages, and what has been computed.

tokens    [ prompt ............................ | generated ..... | unread ]
computed  [ in the cache ..........)  [ this step )  [ later ...   )
pages     | sink | sealed | sealed | recent | open |
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from hashlib import blake2b

import torch

from nibble.formats import PAGE_TOKENS
from nibble.runtime.request import SamplingParams
from nibble.runtime.text import TextStream


@dataclass(eq=False)
class Sequence:
    """The mutable state of a request."""

    request_id: str
    tokens: list[int]
    params: SamplingParams
    text: TextStream
    priority: int = 0
    generator: torch.Generator | None = None
    prompt_tokens: int = 0
    num_computed: int = 0
    num_unread: int = 0  # tokens that were picked on the device and not read back yet
    num_named_pages: int = 0  # full pages that the open pool knows by their key
    slot: int = -1  # its place in tables kept on a device, while it runs
    num_admissions: int = 0  # how often it began to run; each time it has other pages
    cached_tokens: int = 0
    open_pages: dict[int, int] = field(default_factory=dict)  # page of the sequence -> page of the open pool
    sealed_pages: dict[int, int] = field(default_factory=dict)  # page of the sequence -> page of the sealed pool
    page_keys: list[bytes] = field(default_factory=list)  # of full pages
    cancelled: bool = False
    ended: bool = False
    arrival: int = 0
    submitted_at: float = field(default_factory=time.monotonic)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def num_pending(self) -> int:
        """Tokens that were picked but are not in the cache yet; 1 means the sequence is decoding."""
        return len(self.tokens) + self.num_unread - self.num_computed

    def ends_with_unread(self, max_context: int) -> bool:
        """Will the tokens that are not read back yet be its last?"""
        generated, length = self.num_generated + self.num_unread, len(self.tokens) + self.num_unread
        return self.num_unread > 0 and (generated >= self.params.max_tokens or length > max_context)

    def key_of_page(self, page: int) -> bytes:
        """Names the content of a full page: a hash over every token up to its end."""
        while len(self.page_keys) <= page:
            start = len(self.page_keys) * PAGE_TOKENS
            parent = self.page_keys[-1] if self.page_keys else b""
            chunk = ",".join(map(str, self.tokens[start : start + PAGE_TOKENS]))
            self.page_keys.append(blake2b(parent + chunk.encode(), digest_size=16).digest())
        return self.page_keys[page]
