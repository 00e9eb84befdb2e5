"""The chat's turns with a fake model, and the client's inputs."""

from __future__ import annotations

import io
import sys
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from nibble.errors import NibbleError
from serve import chat as chat_module
from serve.chat import Chat
from serve.client import Chunk, ServerError, request_inputs


class FakeLLM:
    """Streams "ok" in two chunks; "fail" fails; "interrupt" is interrupted after the first chunk."""

    def __init__(self) -> None:
        self.seen: list[list[dict[str, str]]] = []
        self.closed = 0

    def stream(self, messages: list[dict[str, str]], **_: Any) -> Generator[Chunk, None, None]:
        self.seen.append(list(messages))
        text = messages[-1]["content"]
        try:
            if text == "fail":
                raise ServerError("server gone")
            yield Chunk("o", (1,), (), None, 5, 1, 0)
            if text == "interrupt":
                raise KeyboardInterrupt
            yield Chunk("k", (2,), (), "stop", 5, 2, 0, "int4")
        finally:
            self.closed += 1


def run_chat(monkeypatch: pytest.MonkeyPatch, lines: str, system: str | None = None) -> tuple[Chat, FakeLLM, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    llm, shown = FakeLLM(), io.StringIO()
    chat = Chat(llm, Console(file=shown, width=200), {}, system)  # type: ignore[arg-type]
    chat.reset()
    chat_module.run(chat)
    return chat, llm, shown.getvalue()


def test_conversation_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    _, llm, shown = run_chat(monkeypatch, "one\n\ntwo\n/exit\nnever\n", system="be brief")
    roles = [message["role"] for message in llm.seen[1]]
    assert roles == ["system", "user", "assistant", "user"]
    assert llm.seen[1][2]["content"] == "ok"
    assert len(llm.seen) == 2
    assert "2 tokens" in shown
    assert "KV=int4" in shown


def test_reset_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    _, llm, _ = run_chat(monkeypatch, "one\n/reset\ntwo\n", system="be brief")
    assert [message["content"] for message in llm.seen[1]] == ["be brief", "two"]


def test_failed_turn_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, llm, shown = run_chat(monkeypatch, "fail\ntwo\n")
    assert "server gone" in shown
    assert [message["content"] for message in llm.seen[1]] == ["two"]
    assert len(chat.messages) == 2


def test_interrupt_ends_the_answer_and_not_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    _, llm, shown = run_chat(monkeypatch, "interrupt\ntwo\n")
    assert "(cancelled)" in shown
    assert llm.closed == 2
    assert [message["content"] for message in llm.seen[1]] == ["interrupt", "o", "two"]


def test_no_server() -> None:
    with pytest.raises(NibbleError, match="make serve PORT=1"):
        chat_module.main(["--port", "1"])


def test_client_inputs_have_the_models_types() -> None:
    inputs = {
        tensor.name(): tensor
        for tensor in request_inputs("hi", {"stop_words": ["a", "b"], "seed": 3, "stream": True, "top_k": None})
    }
    assert {name: (tensor.datatype(), tensor.shape()) for name, tensor in inputs.items()} == {
        "text_input": ("BYTES", [1, 1]),
        "stop_words": ("BYTES", [1, 2]),
        "seed": ("UINT64", [1, 1]),
        "stream": ("BOOL", [1, 1]),
    }
    assert np.frombuffer(inputs["seed"]._raw_content, np.uint64) == [3]  # noqa: SLF001


def test_unknown_parameter_lists_the_inputs() -> None:
    with pytest.raises(NibbleError, match="got max_token, allowed text_input"):
        request_inputs("hi", {"max_token": 3})
