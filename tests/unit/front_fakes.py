"""A stand-in for Triton behind the front, and a front over it that answers through ASGI without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx

from serve.client import Chunk, Prompt
from serve.front.app import make_app
from serve.front.errors import OpenAIError, from_server, unavailable
from serve.front.settings import FrontSettings
from serve.front.triton import TritonModels
from serve.json_log import JsonLog

INT4 = {"model_name": "tiny", "built_kv": "int4", "engine_hash": "abc", "max_context": "64"}
FP16 = {**INT4, "built_kv": "fp16", "kv_fallback": "fp16"}


class FakeTriton(TritonModels):
    """Answers with the words of the prompt. "dead", "refuse" and "break" fail; "wait" answers when it is released."""

    def __init__(self, models: dict[str, dict[str, str]]) -> None:
        self.models = models
        self.asked: list[tuple[str, Prompt, str, dict[str, Any]]] = []
        self.cancelled = 0
        self.release = asyncio.Event()
        self.last_chunk_at = 0.0

    async def close(self) -> None:
        pass

    async def parameters_of(self, model: str, timeout_s: float = 5.0) -> dict[str, str] | None:
        return self.models.get(model)

    async def stream(
        self, model: str, prompt: Prompt, request_id: str, parameters: dict[str, Any]
    ) -> AsyncGenerator[Chunk, None]:
        self.asked.append((model, prompt, request_id, parameters))
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        if text == "dead":
            raise unavailable("Stub process is not healthy")
        if text == "refuse":
            raise from_server("prompt: got 99 tokens, allowed up to 64; shorten it")
        words = text.split() or [text]
        try:
            for index, word in enumerate(words):
                if word == "break":
                    raise OpenAIError(500, "the answer ended early", code="answer_ended_early")
                if word == "wait":
                    await self.release.wait()
                reason = "stop" if index == len(words) - 1 else None
                report = ({"token": word, "bytes": list(word.encode()), "logprob": -1.0, "top": []},)
                yield Chunk(word, (index,), (), reason, 7, index + 1, 2, token_log_probs=report)
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled += 1
            raise


class FrontUnderTest:
    """One front over a FakeTriton, its client and its log."""

    def __init__(self, folder: Path, triton: FakeTriton, **settings: Any) -> None:
        self.triton = triton
        self.log_path = folder / "requests.jsonl"
        names = tuple(triton.models)
        self.app = make_app(FrontSettings(models=names, **settings), JsonLog(self.log_path), triton)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://front")

    async def __aenter__(self) -> FrontUnderTest:
        self._lifespan = self.app.router.lifespan_context(self.app)
        await self._lifespan.__aenter__()
        while (await self.client.get("/health/ready")).status_code != 200:
            await asyncio.sleep(0.01)
        self.triton.asked.clear()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.client.aclose()
        await self._lifespan.__aexit__(None, None, None)

    async def ask(self, prompt: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, **fields}
        return await self.client.post("/v1/completions", json=body, headers=headers)

    @property
    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log_path.read_text().splitlines()]
