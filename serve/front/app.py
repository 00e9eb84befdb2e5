"""The ASGI app: OpenAI's endpoints, health, metrics.

POST /v1/chat/completions   POST /v1/completions   GET /v1/models   GET /v1/models/{name}
GET /health/live            the process turns
GET /health/ready           every engine answered a canary a moment ago; 503 and the reason otherwise
GET /metrics                the front's own; Triton's and the engines' are on Triton's metrics port
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serve.front.engines import Engines, ServedEngine
from serve.front.errors import OpenAIError
from serve.front.exchange import Completions, Front
from serve.front.health import Health
from serve.front.keys import Callers
from serve.front.metrics import FrontMetrics
from serve.front.schema import ChatRequest, CompletionRequest
from serve.front.settings import FrontSettings
from serve.front.triton import TritonModels
from serve.json_log import JsonLog


def make_app(settings: FrontSettings, log: JsonLog, triton: TritonModels | None = None) -> Starlette:
    """The app of one front. Raises NibbleError when the key file is wrong. Call inside a running event loop."""
    triton = triton or TritonModels(settings.triton_url, settings.inactivity_timeout_s)
    engines = Engines(triton, settings.models, settings.split)
    health = Health(engines)
    metrics = FrontMetrics(health, settings.record)
    front = Front(settings, engines, Callers(settings.limits, settings.key_file), health, metrics, log)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        watch = asyncio.create_task(health.watch())
        yield
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
        await triton.close()

    pages = Pages(front)
    return Starlette(
        lifespan=lifespan,
        routes=[
            Route("/v1/chat/completions", Completions(front, ChatRequest), methods=["POST"]),
            Route("/v1/completions", Completions(front, CompletionRequest), methods=["POST"]),
            Route("/v1/models", pages.models),
            Route("/v1/models/{name}", pages.model),
            Route("/health/live", pages.live),
            Route("/health/ready", pages.ready),
            Route("/metrics", pages.metrics),
        ],
        exception_handlers={OpenAIError: _openai_error, HTTPException: _http_error, Exception: pages.fault},
    )


@dataclass(frozen=True)
class Pages:
    """The endpoints that generate nothing."""

    front: Front

    async def models(self, request: Request) -> Response:
        self.front.callers.identify(request.headers.get("authorization"))
        data = [_describe(engine, name) for name, engine in self._by_name().items()]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        self.front.callers.identify(request.headers.get("authorization"))
        name = request.path_params["name"]
        engine = self.front.engines.choose(name, None, None)
        return JSONResponse(_describe(engine, name))

    async def live(self, request: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(self, request: Request) -> Response:
        problem = self.front.health.problem
        if problem is not None:
            return JSONResponse({"status": "not ready", "reason": problem}, 503, {"retry-after": "2"})
        engines = {engine.name: engine.kv for engine in self.front.engines.loaded}
        return JSONResponse({"status": "ready", "engines": engines})

    async def metrics(self, request: Request) -> Response:
        return Response(self.front.metrics.text(), media_type="text/plain; version=0.0.4")

    async def fault(self, request: Request, error: Exception) -> Response:
        trace = "".join(traceback.format_exception(error))
        self.front.log.write("fault", path=request.url.path, error=str(error), trace=trace)
        message = "the front failed; its log says why"
        return OpenAIError(500, message, kind="server_error", code="internal_error").response("")

    def _by_name(self) -> dict[str, ServedEngine]:
        engines = self.front.engines.loaded
        return {engine.name: engine for engine in engines} | {engine.model: engine for engine in reversed(engines)}


def _describe(engine: ServedEngine, name: str) -> dict[str, object]:
    """OpenAI's model object; what is not OpenAI's is under names of ours."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "nibblekv",
        "max_context": engine.max_context,
        "kv_cache": engine.kv,
    }


async def _openai_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OpenAIError)
    return error.response("")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return OpenAIError(error.status_code, message, code="not_found" if error.status_code == 404 else None).response("")
