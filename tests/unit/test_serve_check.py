"""`--check` asks a chat model in chat and any other with a text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from nibble.errors import NibbleError
from serve import check
from serve.client import ServerError


class Answer:
    text, finish_reason, generated_tokens, kv_format = " Paris", "length", 1, "int4"


@pytest.mark.parametrize("refusal", ["messages: this model's tokenizer has no chat template", "the engine failed"])
def test_only_a_missing_chat_template_is_asked_round(refusal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Server:
        def __init__(self, url: str) -> None: ...

        def stream(self, prompt: Any, **parameters: Any) -> Iterator[Answer]:
            asked.append(prompt)
            if not isinstance(prompt, str):
                raise ServerError(refusal)
            yield Answer()

    monkeypatch.setattr(check, "TritonLLM", Server)
    console = Console(record=True, width=120)
    if "template" in refusal:
        check.ask_one_question("url", console)
        assert asked[1:] == [check.TEXT]
        assert "check passed: 1 tokens through KV=int4" in console.export_text()
    else:
        with pytest.raises(NibbleError, match=refusal):
            check.ask_one_question("url", console)
