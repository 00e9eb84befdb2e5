"""One request from its bytes to its last event: identify, limit, parse, choose an engine, stream or collect.

It is plain ASGI, not a request handler of the framework, for two reasons: a client that goes away must cancel its
request on the engine at once, streaming or not; and what was admitted must be released whichever way it ends.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from serve.client import Chunk
from serve.front.bodies import Answers
from serve.front.engines import Engines, ServedEngine
from serve.front.errors import OpenAIError
from serve.front.health import Health
from serve.front.keys import Caller, Callers
from serve.front.metrics import FrontMetrics
from serve.front.schema import ChatRequest, CompletionRequest, parse
from serve.front.settings import FrontSettings
from serve.json_log import JsonLog

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
SSE_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
CLIENT_GONE = 499  # as nginx logs it


@dataclass(frozen=True)
class Front:
    """What all requests share."""

    settings: FrontSettings
    engines: Engines
    callers: Callers
    health: Health
    metrics: FrontMetrics
    log: JsonLog


@dataclass
class Exchange:
    """One request's record, which becomes its log line."""

    request_id: str
    began: float = field(default_factory=time.monotonic)
    status: int = 0
    key: str | None = None
    engine: ServedEngine | None = None
    error: OpenAIError | None = None
    first_chunk_s: float | None = None
    last: Chunk | None = None

    def fields(self) -> dict[str, Any]:
        """The log line's fields: who, what, how long; never what was said."""
        last = self.last
        return {
            "request_id": self.request_id,
            "status": self.status,
            "key": self.key,
            "engine": self.engine.name if self.engine else None,
            "kv": self.engine.kv if self.engine else None,
            "prompt_tokens": last.prompt_tokens if last else None,
            "cached_tokens": last.cached_tokens if last else None,
            "generated_tokens": last.generated_tokens if last else None,
            "finish_reason": last.finish_reason if last else None,
            "ttft_ms": None if self.first_chunk_s is None else round(self.first_chunk_s * 1000, 1),
            "duration_ms": round((time.monotonic() - self.began) * 1000, 1),
            "error": str(self.error) if self.error else None,
        }


class Completions:
    """An endpoint that generates text. schema: the body it takes."""

    def __init__(self, front: Front, schema: type[ChatRequest] | type[CompletionRequest]) -> None:
        self._front = front
        self._schema = schema
        self._endpoint = "chat" if schema is ChatRequest else "completions"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        exchange = Exchange(_request_id(request))
        metrics = self._front.metrics
        with metrics.in_flight.track_inprogress():
            try:
                await self._answer(request, send, exchange)
            except OpenAIError as error:
                exchange.status, exchange.error = error.status, error
                await error.response(exchange.request_id)(scope, receive, send)
            except ClientGone:
                exchange.status = CLIENT_GONE
                metrics.abandoned.inc()
        self._record(exchange)

    async def _answer(self, request: Request, send: Send, exchange: Exchange) -> None:
        caller = self._front.callers.identify(request.headers.get("authorization"))
        exchange.key = caller.name
        with caller.admit():
            await self._generate(request, send, exchange, caller)

    async def _generate(self, request: Request, send: Send, exchange: Exchange, caller: Caller) -> None:
        asked = parse(self._schema, await read_body(request, self._front.settings))
        engine = exchange.engine = self._front.engines.choose(asked.model, asked.kv_cache, asked.user)
        answers = Answers(
            request_id=exchange.request_id,
            model=engine.name,
            fingerprint=engine.fingerprint,
            is_chat=self._schema is ChatRequest,
            has_log_probs=asked.parameters()["top_log_probs"] is not None,
        )
        chunks = self._chunks(asked, engine, caller, exchange)
        if asked.stream:
            work = self._stream(chunks, answers, asked.wants_usage, send, exchange)
        else:
            work = self._whole(chunks, answers, send, exchange)
        await until_disconnect(request.receive, work)

    async def _chunks(
        self, asked: ChatRequest | CompletionRequest, engine: ServedEngine, caller: Caller, exchange: Exchange
    ) -> AsyncGenerator[Chunk, None]:
        parameters = asked.parameters()
        parameters["max_tokens"] = parameters["max_tokens"] or engine.max_context
        parameters["priority"] = min(asked.priority or 0, caller.limits.max_priority)
        source = self._front.engines.triton.stream(
            engine.triton_model, asked.prompt_text, exchange.request_id, parameters
        )
        async with aclosing(source):
            async for chunk in source:
                if exchange.first_chunk_s is None:
                    exchange.first_chunk_s = time.monotonic() - exchange.began
                exchange.last = chunk
                yield chunk

    async def _whole(
        self, chunks: AsyncGenerator[Chunk, None], answers: Answers, send: Send, exchange: Exchange
    ) -> None:
        async with aclosing(chunks):
            collected = [chunk async for chunk in chunks]
        exchange.status = 200
        response = JSONResponse(answers.whole(collected), 200, {"x-request-id": exchange.request_id})
        await response({"type": "http"}, _never, send)

    async def _stream(
        self, chunks: AsyncGenerator[Chunk, None], answers: Answers, wants_usage: bool, send: Send, exchange: Exchange
    ) -> None:
        """Server-sent events. An error before the first chunk is an HTTP error, one after it an event."""
        async with aclosing(chunks):
            first = await anext(chunks)
            await _start_events(send, exchange)
            await _send_event(send, answers.opening())
            await _send_event(send, answers.event(first))
            try:
                async for chunk in chunks:
                    await _send_event(send, answers.event(chunk))
            except OpenAIError as error:
                exchange.error = error
                await _send_event(send, error.body)
            else:
                if wants_usage and exchange.last is not None:
                    await _send_event(send, answers.usage_event(exchange.last))
                await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def _record(self, exchange: Exchange) -> None:
        front = self._front
        front.metrics.requests.labels(self._endpoint, str(exchange.status)).inc()
        if exchange.error is not None:
            front.metrics.errors.labels(exchange.error.code or "unknown").inc()
            if exchange.error.code == "server_unavailable":
                front.health.suspect()
        front.log.write("request", endpoint=self._endpoint, **exchange.fields())


class ClientGone(Exception):
    """The client closed its connection."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work; cancel it and raise ClientGone when the client goes away before it is done."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        task.result()
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def read_body(request: Request, settings: FrontSettings) -> bytes:
    """The request's bytes. Raises OpenAIError when they are too many (413) or too slow (408), ClientGone."""
    limit = settings.max_body_bytes
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                body += message.get("body", b"")
                if len(body) > limit:
                    raise OpenAIError(413, f"body: got over {limit} bytes, allowed {limit}", code="request_too_large")
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        message_text = f"the body did not arrive within {settings.body_timeout_s:g} s"
        raise OpenAIError(408, message_text, code="request_timeout") from None


def _request_id(request: Request) -> str:
    given = request.headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else secrets.token_hex(12)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _never() -> Any:
    await asyncio.Event().wait()


async def _start_events(send: Send, exchange: Exchange) -> None:
    exchange.status = 200
    headers = [*SSE_HEADERS, (b"x-request-id", exchange.request_id.encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _send_event(send: Send, event: dict[str, Any] | None) -> None:
    if event is not None:
        body = b"data: " + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
        await send({"type": "http.response.body", "body": body, "more_body": True})
