"""A request's tensors become a `Question`, or a NibbleError that says which input is wrong and what is allowed.

HTTP's generate puts fields that are no inputs of the model into the request's parameters. A known name there (clients
nest them under "parameters") counts as the input; an unknown one is an error, for `max_token` must not pass unnoticed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nibble.errors import NibbleError
from nibble.runtime import SamplingParams
from serve.tensors import INPUTS

FOREIGN_PARAMETERS = ("triton_", "sequence_", "binary_data_output", "priority", "timeout", "id")  # Triton's own
CHAT_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Question:
    """One request. Exactly one of text and messages is set. top_log_probs: None for no report of tokens."""

    text: str | None
    messages: list[dict[str, str]] | None
    params: SamplingParams
    stream: bool
    return_log_probs: bool
    priority: int
    top_log_probs: int | None = None


def read_question(tensors: Mapping[str, np.ndarray | None], parameters: Mapping[str, Any]) -> Question:
    """Validate one request. tensors: input arrays by name; parameters: the request's parameters by name."""
    values = {**_known_parameters(parameters), **{name: array for name, array in tensors.items() if array is not None}}
    reader = _Reader(values)
    text, messages = reader.text("text_input"), reader.text("messages")
    if (text is None) == (messages is None):
        raise NibbleError(f"got {'neither' if text is None else 'both'} of text_input and messages; send exactly one")
    return Question(
        text=text,
        messages=None if messages is None else read_messages(messages),
        params=_sampling_params(reader),
        stream=bool(reader.number("stream", False)),
        return_log_probs=bool(reader.number("return_log_probs", False)),
        priority=int(reader.number("priority", 0)),
        top_log_probs=None if (top := reader.number("top_log_probs", None)) is None else int(top),
    )


def read_messages(text: str) -> list[dict[str, str]]:
    """A chat from its JSON text. Raises NibbleError naming the message that is wrong."""
    try:
        messages = json.loads(text)
    except json.JSONDecodeError as error:
        raise NibbleError(f'messages: not JSON ({error}); allowed [{{"role": ..., "content": ...}}, ...]') from error
    if not isinstance(messages, list) or not messages:
        raise NibbleError("messages: allowed a JSON list of at least one {role, content}")
    for index, message in enumerate(messages):
        _check_message(index, message)
    return messages


def _check_message(index: int, message: Any) -> None:
    if not isinstance(message, dict) or set(message) != {"role", "content"}:
        raise NibbleError(f"messages[{index}]: got {message!r}, allowed an object with role and content")
    if message["role"] not in CHAT_ROLES or not isinstance(message["content"], str):
        raise NibbleError(
            f"messages[{index}]: got role {message['role']!r}, allowed {', '.join(CHAT_ROLES)}; content is a string"
        )


def _sampling_params(reader: _Reader) -> SamplingParams:
    defaults = SamplingParams()
    seed = reader.number("seed", None)
    return SamplingParams(
        max_tokens=int(reader.number("max_tokens", defaults.max_tokens)),
        temperature=float(reader.number("temperature", defaults.temperature)),
        top_k=int(reader.number("top_k", defaults.top_k)),
        top_p=float(reader.number("top_p", defaults.top_p)),
        seed=None if seed is None else int(seed),
        stop=tuple(reader.texts("stop_words")),
        logprobs=int(reader.number("top_log_probs", defaults.logprobs)),
        ignore_eos=bool(reader.number("ignore_eos", False)),
    )


def _known_parameters(parameters: Mapping[str, Any]) -> dict[str, np.ndarray]:
    known = {}
    for name, value in parameters.items():
        if name in INPUTS:
            known[name] = np.array([value], dtype=object)
        elif not name.startswith(FOREIGN_PARAMETERS):
            raise NibbleError(f"unknown input {name!r}; allowed {', '.join(INPUTS)}")
    return known


class _Reader:
    """Typed access to the arrays of one request."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = arrays

    def number(self, name: str, default: Any) -> Any:
        """The one number or bool of an input; `default` when it is not there."""
        if name not in self._arrays:
            return default
        value = self._one(name)
        if isinstance(value, str | bytes) or not np.isfinite(value):
            raise NibbleError(f"{name}: got {value!r}, allowed a finite {INPUTS[name].data_type}")
        return value

    def text(self, name: str) -> str | None:
        """The one string of an input, or None when it is not there."""
        return _decode(name, self._one(name)) if name in self._arrays else None

    def texts(self, name: str) -> list[str]:
        """All strings of a list input, empty ones left out (TensorRT-LLM's clients send [""] for none)."""
        if name not in self._arrays:
            return []
        return [text for item in self._arrays[name].reshape(-1) if (text := _decode(name, item))]

    def _one(self, name: str) -> Any:
        array = self._arrays[name]
        if array.size != 1:
            raise NibbleError(f"{name}: got shape {list(array.shape)}, allowed one value (shape [1, 1])")
        return array.reshape(-1).tolist()[0]


def _decode(name: str, value: Any) -> str:
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise NibbleError(f"{name}: not valid UTF-8 at byte {error.start}") from error
