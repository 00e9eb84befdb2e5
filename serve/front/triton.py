"""The served models over tritonclient's asyncio gRPC: one channel, one stream for each request.

A server whose model died sends nothing at all, so silence is an error after `inactivity_timeout_s`. Leaving a stream,
by error or by cancelling the task, cancels the request on the server.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
import tritonclient.grpc.aio as grpcclient
from tritonclient.utils import InferenceServerException

from nibble.errors import NibbleError
from serve.client import Chunk, Prompt, ServerError, read_chunk, request_inputs
from serve.front.errors import OpenAIError, from_server, unavailable

RECONNECT_MS = 500  # gRPC's own back-off grows to two minutes, far longer than a restart of the server
CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS),
    ("grpc.min_reconnect_backoff_ms", RECONNECT_MS),
    ("grpc.max_reconnect_backoff_ms", RECONNECT_MS),
]


class TritonModels:
    """The models of one Triton endpoint (host:port of gRPC). Make it inside a running event loop.

    last_chunk_at: when any stream last received something, on the monotonic clock.
    """

    def __init__(self, url: str, inactivity_timeout_s: float) -> None:
        self.url = url
        self._inactivity_timeout_s = inactivity_timeout_s
        self.last_chunk_at = -math.inf
        self._client = grpcclient.InferenceServerClient(url, channel_args=CHANNEL_OPTIONS)

    async def close(self) -> None:
        await self._client.close()

    async def stream(
        self, model: str, prompt: Prompt, request_id: str, parameters: dict[str, Any]
    ) -> AsyncGenerator[Chunk, None]:
        """The answer as it comes. Raises OpenAIError."""
        try:
            inputs = request_inputs(prompt, {"stream": True, **parameters})
        except UnicodeEncodeError as error:
            raise OpenAIError(400, f"the text is not valid Unicode: {error.reason}", code="invalid_value") from error
        responses = self._client.stream_infer(_once({"model_name": model, "inputs": inputs, "request_id": request_id}))
        is_complete = False
        try:
            async for chunk in self._chunks(responses):
                yield chunk
            is_complete = True
        finally:
            if not is_complete:  # cancelling a stream that is about to end by itself would keep its model in memory
                responses.cancel()

    async def parameters_of(self, model: str, timeout_s: float = 5.0) -> dict[str, str] | None:
        """A model's parameters in config.pbtxt; None when it is not loaded. Raises OpenAIError: no server answers."""
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._client.get_model_config(model)
        except InferenceServerException as error:
            if "not found" in str(error) or "no available versions" in str(error):
                return None
            raise unavailable(str(error)) from error
        except TimeoutError as error:
            raise unavailable(f"{self.url}: no response for {timeout_s:g} s") from error
        return {key: value.string_value for key, value in answer.config.parameters.items()}

    async def _chunks(self, responses: Any) -> AsyncIterator[Chunk]:
        last: Chunk | None = None
        while True:
            try:
                async with asyncio.timeout(self._inactivity_timeout_s):
                    result, error = await anext(responses)
            except StopAsyncIteration:
                if last is not None and last.finish_reason:
                    return
                raise unavailable("the server ended the answer before it was complete") from None
            except TimeoutError:
                raise unavailable(f"no response for {self._inactivity_timeout_s:g} s") from None
            except grpc.aio.AioRpcError as broken:
                raise unavailable(f"the model can't answer now: {broken.details()}") from broken
            if error is not None:
                raise from_server(error.message())
            if result.get_response().outputs:
                last = _read(result, last)
                self.last_chunk_at = time.monotonic()
                yield last


def _read(result: Any, before: Chunk | None) -> Chunk:
    try:
        return read_chunk(result, before)
    except ServerError as error:
        raise OpenAIError(500, str(error), kind="server_error", code="answer_ended_early") from error
    except NibbleError as error:
        raise from_server(str(error)) from error


async def _once(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield request
