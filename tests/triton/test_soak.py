"""The short form of `make soak`: every kind of client at once, every answer checked, nothing left behind."""

from __future__ import annotations

import asyncio
from collections import Counter

from bench.soak.load import soak
from bench.soak.workload import Kind
from tests.triton.running_server import RunningServer, wait_for

SECONDS = 12.0


def test_short_soak(server: RunningServer) -> None:
    server.wait_front()
    url = server.front_url.removesuffix("/v1")
    tally = asyncio.run(soak(url, "smollm2-135m", streams=12, seconds=SECONDS, seed=1))
    assert not tally.wrong, tally.wrong[:5]
    assert tally.told_errors == 0
    good = Counter({kind: count for kind, count in tally.done.items() if kind in (Kind.STREAM, Kind.WHOLE)})
    assert good.total() > 0
    wait_for(lambda: server.metric("nibble_requests") == 0, 20, "the engine to be idle")
    wait_for(lambda: server.metric("nibble_pages", state="used") == 0, 20, "pages to be free")
    assert "restarting" not in server.output.rpartition("ready after")[2]
