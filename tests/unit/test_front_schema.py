"""Request bodies: a table of wrong ones, and random ones that may only ever be refused in OpenAI's way."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.client import request_inputs
from serve.front.errors import OpenAIError, from_server
from serve.front.schema import ChatRequest, CompletionRequest, parse

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
BAD: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages.0.role", "invalid_value"),
    ({"messages": [{"role": "user", "content": None}]}, None, "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": True}, "max_tokens", "invalid_value"),
    ({"max_tokens": "8"}, "max_tokens", "invalid_value"),
    ({"temperature": 2.5}, "temperature", "invalid_value"),
    ({"seed": -1}, "seed", "invalid_value"),
    ({"n": 2}, "n", "invalid_value"),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "invalid_value"),
    ({"top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"response_format": {"type": "json_object"}}, "response_format.type", "invalid_value"),
    ({"tools": []}, "tools", "unsupported_parameter"),
    ({"max_token": 4}, "max_token", "unsupported_parameter"),
    ({"model": None}, "model", "invalid_value"),
]


@pytest.mark.parametrize(("change", "param", "code"), BAD)
def test_bad_fields_are_named(change: dict[str, Any], param: str | None, code: str) -> None:
    with pytest.raises(OpenAIError) as refused:
        parse(ChatRequest, json.dumps({**CHAT, **change}).encode())
    error = refused.value.body["error"]
    assert (refused.value.status, error["code"]) == (400, code)
    assert param is None or error["param"] == param


BAD_BYTES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"model": "m", "prompt": "\xff"}',
    b'{"model": "m", "prompt": "\\ud800"}',
    b"\x00",
]


@pytest.mark.parametrize("body", BAD_BYTES)
def test_bytes_that_are_no_request(body: bytes) -> None:
    with pytest.raises(OpenAIError) as refused:
        parse(CompletionRequest, body)
    assert refused.value.status == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, "tools"})


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6), st.booleans())
def test_any_json_is_parsed_or_refused(changes: dict[str, Any], is_chat: bool) -> None:
    """What is taken makes tensors that Triton's client can send."""
    base: dict[str, Any] = CHAT if is_chat else {"model": "m", "prompt": "hi"}
    body = json.dumps({**base, **changes}).encode("utf-8", "surrogatepass")
    refused: OpenAIError | None = None
    try:
        request: Any = parse(ChatRequest if is_chat else CompletionRequest, body)
    except OpenAIError as error:
        refused = error
    else:
        request_inputs(request.prompt_text, request.parameters())
    assert refused is None or (refused.status == 400 and refused.body["error"]["message"])


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(OpenAIError):
        parse(ChatRequest, body)


SERVER_MESSAGES = [
    ("prompt: got 600 tokens, allowed up to 512; shorten it", 400, "context_length_exceeded"),
    ("queue: 8 requests wait, allowed 8; try again later", 503, "queue_full"),
    ("Stub process 'llm_0_0' is not healthy.", 503, "server_unavailable"),
    ("the engine failed; the server restarts it, ask again", 503, "server_unavailable"),
    ("stop_words: not valid UTF-8 at byte 0", 400, "invalid_value"),
    ("something else", 500, "internal_error"),
]


@pytest.mark.parametrize(("message", "status", "code"), SERVER_MESSAGES)
def test_messages_of_the_server(message: str, status: int, code: str) -> None:
    error = from_server(message)
    assert (error.status, error.code) == (status, code)
