"""Is this server able to answer? A canary says so: one token from each engine, every few seconds.

Triton calls itself healthy when its model's process is dead or hangs, so /health/ready asks the canary and not Triton.
An answer of "queue full" counts as life, and so does any other request's token: a full engine is busy, not ill.
"""

from __future__ import annotations

import asyncio
import time

from serve.canary import CANARY_PARAMETERS, CANARY_PROMPT
from serve.front.engines import Engines, ServedEngine
from serve.front.errors import OpenAIError
from serve.tensors import CANARY_ID

INTERVAL_S = 5.0
RETRY_S = 0.5
TIMEOUT_S = 10.0


class Health:
    """The newest verdict. problem: why the server is not ready, None when it is."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self.problem: str | None = "the first canary has not been answered yet"
        self.canary_s = 0.0
        self._wake = asyncio.Event()

    def suspect(self) -> None:
        """A request failed as if nobody answered: look now, not at the next interval."""
        self._wake.set()

    async def watch(self) -> None:
        """Look after the engines until cancelled."""
        while True:
            self.problem = await self._look()
            self._wake.clear()
            try:
                async with asyncio.timeout(RETRY_S if self.problem else INTERVAL_S):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _look(self) -> str | None:
        try:
            await self._engines.refresh()
            if not self._engines.loaded:
                return "no engine is loaded"
            for engine in self._engines.loaded:
                await self._ask(engine)
        except OpenAIError as error:
            return None if error.code == "queue_full" else str(error)
        return None

    async def _ask(self, engine: ServedEngine) -> None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                async for _ in self._engines.triton.stream(
                    engine.triton_model, CANARY_PROMPT, CANARY_ID, CANARY_PARAMETERS
                ):
                    pass
        except TimeoutError:
            if time.monotonic() - self._engines.triton.last_chunk_at < TIMEOUT_S:
                return
            message = f"engine {engine.name} did not answer a canary within {TIMEOUT_S:g} s"
            raise OpenAIError(503, message, code="canary") from None
        self.canary_s = time.monotonic() - began
