"""Errors in OpenAI's shape: what an `openai` client turns into its exceptions.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

Triton's streaming gRPC carries a message and no code, so what the server meant is read from the message: our own
messages name the field first, and what says that nobody is there to answer is a short list.
"""

from __future__ import annotations

import re
from typing import Any

from starlette.responses import JSONResponse

TOO_LONG = re.compile(r"prompt: got \d+ tokens, allowed up to")
QUEUE_FULL = re.compile(r"queue|Exceeds maximum queue size")
UNAVAILABLE = re.compile(
    r"Stub process|not healthy|engine failed|server is stopping|is not ready|failed to connect|Connection refused|"
    r"Socket closed|no response for|unknown model|unavailable|Connection reset|GOAWAY|shutting down",
    re.IGNORECASE,
)
FIELD = re.compile(r"^(?:[\w.]+:\d+: )?([a-z][a-z_]*)(?:\[\d+\])?: ")
RENAMED = {"stop_words": "stop", "text_input": "prompt", "top_log_probs": "top_logprobs"}


class OpenAIError(Exception):
    """An HTTP status and an OpenAI error object. retry_after_s: seconds after which asking again makes sense."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self, request_id: str) -> JSONResponse:
        """The error as a whole HTTP answer."""
        headers = {"x-request-id": request_id}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, round(self.retry_after_s)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


def unavailable(message: str) -> OpenAIError:
    """Nobody answers now; a supervisor may be restarting the server."""
    return OpenAIError(503, message, kind="server_error", code="server_unavailable", retry_after_s=2)


def from_server(message: str) -> OpenAIError:
    """What Triton or the model said, as the error that a client of OpenAI expects."""
    if TOO_LONG.search(message):
        return OpenAIError(400, message, code="context_length_exceeded", param="messages")
    if UNAVAILABLE.search(message):
        return unavailable(f"the model can't answer now: {message}")
    if QUEUE_FULL.search(message):
        return OpenAIError(503, message, kind="server_error", code="queue_full", retry_after_s=1)
    if field := FIELD.search(message):
        return OpenAIError(400, message, code="invalid_value", param=RENAMED.get(field[1], field[1]))
    return OpenAIError(500, message, kind="server_error", code="internal_error")
