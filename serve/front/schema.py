"""OpenAI's request bodies, as strict as the rest: a field that this server can't honour is an error, never ignored.

    >>> parse(CompletionRequest, b'{"model": "m", "prompt": "Hi", "max_tokens": 4}').parameters()["max_tokens"]
    4

Beyond OpenAI's fields: top_k, ignore_eos, priority, and kv_cache (the KV format that this request asks for).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serve.front.errors import OpenAIError

Stop = str | Annotated[list[str], Field(max_length=16)] | None
Penalty = Annotated[float, Field(ge=0, le=0)] | None
MAX_INT32 = 2**31 - 1


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    """include_usage: one more event at the end, with the counts of tokens."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class TextPart(_Strict):
    """A piece of a message; text alone, for the models served have no eyes or ears."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """One turn of a chat. name: accepted, as templates don't use it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: str | None = None

    def as_template_input(self) -> dict[str, str]:
        """The turn as chat templates take it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class TextFormat(_Strict):
    """The only answer format there is."""

    type: Literal["text"]


class _Request(_Strict):
    """What both endpoints share."""

    model: str
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: Stop = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    kv_cache: str | None = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def _sampling(self) -> dict[str, Any]:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        return {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "stop_words": stop or None,
            "ignore_eos": self.ignore_eos,
        }


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: TextFormat | None = None

    @property
    def prompt_text(self) -> list[dict[str, str]]:
        return [message.as_template_input() for message in self.messages]

    def parameters(self) -> dict[str, Any]:
        """Inputs of the served model; max_tokens is None where the context is the only limit."""
        top = (self.top_logprobs or 0) if self.logprobs else None
        return {**self._sampling(), "max_tokens": self.max_completion_tokens or self.max_tokens, "top_log_probs": top}


class CompletionRequest(_Request):
    """POST /v1/completions. One prompt, as text."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None

    @property
    def prompt_text(self) -> str:
        return self.prompt if isinstance(self.prompt, str) else self.prompt[0]

    def parameters(self) -> dict[str, Any]:
        """Inputs of the served model. OpenAI's default length of a completion is 16 tokens."""
        return {**self._sampling(), "max_tokens": self.max_tokens or 16, "top_log_probs": self.logprobs}


AnyRequest = TypeVar("AnyRequest", bound=_Request)


def parse(schema: type[AnyRequest], body: bytes) -> AnyRequest:
    """A request body as its schema. Raises OpenAIError (400) that names the field, what was got and what is allowed."""
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise _as_openai(schema, error) from error


def _as_openai(schema: type[BaseModel], error: ValidationError) -> OpenAIError:
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return OpenAIError(400, f"the body is not valid JSON: {first['msg']}", code="invalid_json")
    param = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("list[", "constrained-")))
    if first["type"] == "extra_forbidden":
        allowed = ", ".join(sorted(schema.model_fields))
        message = f"{param}: this server has no such field, or can't honour it; allowed: {allowed}"
        return OpenAIError(400, message, code="unsupported_parameter", param=param)
    if first["type"] == "missing":
        return OpenAIError(400, f"{param}: missing, and needed", code="missing_required_parameter", param=param)
    got = repr(first["input"])
    message = f"{param or 'body'}: got {got if len(got) < 80 else got[:77] + '...'}: {first['msg']}"
    return OpenAIError(400, message, code="invalid_value", param=param or None)
