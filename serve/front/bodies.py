"""OpenAI's answer bodies, made from the chunks of the served model.

`Answers` is one request's: it stamps every event with the same id, time, model and fingerprint. The fingerprint says
which KV format and which engine answered, such as `int4-cc6c16b86bd4`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from serve.client import Chunk

FINISH = {"stop": "stop", "length": "length"}


def usage(last: Chunk) -> dict[str, Any]:
    """Counts of tokens, from the newest chunk."""
    return {
        "prompt_tokens": last.prompt_tokens,
        "completion_tokens": last.generated_tokens,
        "total_tokens": last.prompt_tokens + last.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": last.cached_tokens},
    }


@dataclass
class Answers:
    """The bodies of one request. is_chat: which endpoint's. has_log_probs: the client asked for them."""

    request_id: str
    model: str
    fingerprint: str
    is_chat: bool
    has_log_probs: bool
    created: int = field(default_factory=lambda: int(time.time()))
    _offset: int = 0

    def whole(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """The answer of a request that doesn't stream."""
        text = "".join(chunk.text for chunk in chunks)
        choice: dict[str, Any] = {"index": 0, "finish_reason": FINISH.get(chunks[-1].finish_reason or "")}
        choice |= {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        choice["logprobs"] = self._log_probs(chunks)
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self._stamp(kind), "choices": [choice], "usage": usage(chunks[-1])}

    def opening(self) -> dict[str, Any] | None:
        """The event before the first token: chats name the role."""
        return self._event({"delta": {"role": "assistant", "content": ""}}, None) if self.is_chat else None

    def event(self, chunk: Chunk) -> dict[str, Any] | None:
        """The event of one chunk; None when it has nothing that a client would see."""
        if not (chunk.text or chunk.finish_reason or self.has_log_probs):
            return None
        if self.is_chat:
            content: dict[str, Any] = {"delta": {"content": chunk.text} if chunk.text else {}}
        else:
            content = {"text": chunk.text}
        content["logprobs"] = self._log_probs([chunk])
        return self._event(content, FINISH.get(chunk.finish_reason or ""))

    def usage_event(self, last: Chunk) -> dict[str, Any]:
        """The event that `include_usage` asks for."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return {**self._stamp(kind), "choices": [], "usage": usage(last)}

    def _event(self, content: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return {**self._stamp(kind), "choices": [{"index": 0, **content, "finish_reason": finish_reason}]}

    def _stamp(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def _log_probs(self, chunks: Sequence[Chunk]) -> dict[str, Any] | None:
        if not self.has_log_probs:
            return None
        tokens = [token for chunk in chunks for token in chunk.token_log_probs]
        return {"content": [_chat_token(token) for token in tokens]} if self.is_chat else self._legacy(tokens)

    def _legacy(self, tokens: list[dict[str, Any]]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token["token"])
        return {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": [{other["token"]: other["logprob"] for other in token["top"]} for token in tokens],
            "text_offset": offsets,
        }


def _chat_token(token: dict[str, Any]) -> dict[str, Any]:
    return {
        "token": token["token"],
        "bytes": token["bytes"],
        "logprob": token["logprob"],
        "top_logprobs": token["top"],
    }
