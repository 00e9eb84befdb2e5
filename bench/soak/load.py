"""The load: `streams` clients that each make one request after another until the time is up."""

from __future__ import annotations

import asyncio
import random
import time

from bench.soak.client import SoakClient, Tally
from bench.soak.workload import MAX_TOKENS, Prompt, make_prompts, make_task

SHORT_TAGS, SHORT_TOKENS = 8, 12


async def run_load(
    client: SoakClient, prompts: list[Prompt], *, streams: int, seconds: float, seed: int, max_tokens: int = MAX_TOKENS
) -> None:
    """Load a front for `seconds`; the client's tally says how it went. The golden answers are learnt first."""
    await client.learn(prompts, max_tokens)
    deadline = time.monotonic() + seconds

    async def work(worker: int) -> None:
        source = random.Random(f"{seed} {worker}")  # noqa: S311
        while time.monotonic() < deadline:
            await client.perform(make_task(source, prompts, max_tokens))

    await asyncio.gather(*(work(worker) for worker in range(streams)))


async def soak(url: str, model: str, *, streams: int, seconds: float, seed: int) -> Tally:
    """The short form: fewer and shorter answers, load alone, no faults."""
    tally, prompts = Tally(), make_prompts(seed, SHORT_TAGS)
    client = SoakClient(url, model, prompts, tally)
    try:
        await run_load(client, prompts, streams=streams, seconds=seconds, seed=seed, max_tokens=SHORT_TOKENS)
    finally:
        await client.close()
    return tally
