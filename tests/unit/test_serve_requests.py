"""Requests: what a client may send, and what it is told when it sends something else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nibble.errors import NibbleError
from serve.backend.requests import read_question


def strings(*values: bytes) -> np.ndarray:
    return np.array([list(values)], dtype=object)


TEXT = {"text_input": strings(b"hi")}


def test_full_request() -> None:
    question = read_question(
        {
            "text_input": strings("grüß".encode()),
            "max_tokens": np.array([[7]], np.int32),
            "temperature": np.array([[0.5]], np.float32),
            "top_k": np.array([[3]], np.int32),
            "top_p": np.array([[0.5]], np.float32),
            "stop_words": strings(b"a", b"", b"bc"),
            "seed": np.array([[9]], np.uint64),
            "stream": np.array([[True]]),
            "return_log_probs": np.array([[True]]),
            "priority": np.array([[2]], np.int32),
            "messages": None,
        },
        {},
    )
    params = question.params
    assert (question.text, question.messages, question.stream, question.priority) == ("grüß", None, True, 2)
    assert question.return_log_probs
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (7, 0.5, 3, 0.5)
    assert (params.stop, params.seed) == (("a", "bc"), 9)


def test_chat_request() -> None:
    question = read_question({"messages": strings(b'[{"role": "user", "content": "hi"}]')}, {})
    assert question.messages == [{"role": "user", "content": "hi"}]


def test_known_parameters_count_as_inputs_and_tensors_win() -> None:
    question = read_question(
        {**TEXT, "top_k": np.array([[3]], np.int32)},
        {"max_tokens": 5, "top_k": 9, "triton_enable_empty_final_response": True},
    )
    assert (question.params.max_tokens, question.params.top_k) == (5, 3)


BAD_REQUESTS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {}, "neither of text_input and messages"),
    ({**TEXT, "messages": strings(b"[]")}, {}, "both of text_input and messages"),
    ({"text_input": strings(b"a", b"b")}, {}, r"text_input: got shape \[1, 2\]"),
    ({"text_input": np.zeros((1, 0), object)}, {}, r"text_input: got shape \[1, 0\]"),
    ({"text_input": strings(b"ab\xff")}, {}, "text_input: not valid UTF-8 at byte 2"),
    ({**TEXT, "stop_words": strings(b"\xff")}, {}, "stop_words: not valid UTF-8"),
    ({**TEXT, "max_tokens": np.array([[0]])}, {}, "max_tokens: got 0, allowed 1 or more"),
    ({**TEXT, "max_tokens": np.array([[1, 2]])}, {}, "max_tokens: got shape"),
    ({**TEXT, "temperature": np.array([[np.nan]])}, {}, "temperature: got nan"),
    ({**TEXT, "temperature": np.array([[-1.0]])}, {}, "temperature: got -1.0"),
    ({**TEXT, "top_p": np.array([[1.5]])}, {}, "top_p: got 1.5"),
    (TEXT, {"max_tokens": "many"}, "max_tokens: got 'many'"),
    (TEXT, {"max_token": 3}, "unknown input 'max_token'; allowed text_input"),
    ({"messages": strings(b"{")}, {}, "messages: not JSON"),
    ({"messages": strings(b"[]")}, {}, "at least one"),
    ({"messages": strings(b"[1]")}, {}, r"messages\[0\]: got 1"),
    ({"messages": strings(b'[{"role": "boss", "content": "x"}]')}, {}, "got role 'boss', allowed system"),
    ({"messages": strings(b'[{"role": "user", "content": 1}]')}, {}, "content is a string"),
]


@pytest.mark.parametrize(("tensors", "parameters", "message"), BAD_REQUESTS)
def test_bad_request(tensors: dict[str, Any], parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(NibbleError, match=message):
        read_question(tensors, parameters)
