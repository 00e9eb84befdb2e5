"""A server with two engines under an operator's hands: side by side, live fallback, hangs, kills, what is monitored.

Its own server: these tests change what is served and kill it over and over.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from nibble.paths import REPOSITORY_ROOT
from serve.control import find_server
from serve.processes import stubs_of
from tests.triton.running_server import RunningServer, wait_for

MONITORING = REPOSITORY_ROOT / "docker" / "monitoring"
METRIC = re.compile(r"\b(?:nibble|nv)_[a-z0-9_]+")
CANARY_S = 5.0


@pytest.fixture(scope="module")
def operated(start_server: Callable[..., RunningServer]) -> RunningServer:
    server = start_server("--beside", "fp16", "--split", "int4=1,fp16=1", "--canary-timeout", str(CANARY_S))
    server.wait_ready()
    server.wait_front()
    return server


@pytest.fixture
def client(operated: RunningServer) -> openai.OpenAI:
    operated.wait_front()
    return openai.OpenAI(base_url=operated.front_url, api_key="-", max_retries=0, timeout=60)


def fingerprint(client: openai.OpenAI, model: str, **extra: Any) -> str:
    answer = client.completions.create(model=model, prompt="1 2 3", max_tokens=2, extra_body=extra)
    return str(answer.system_fingerprint).partition("-")[0]


def test_two_engines_a_split_and_an_opt_out(client: openai.OpenAI) -> None:
    assert fingerprint(client, "smollm2-135m-int4") == "int4"
    assert fingerprint(client, "smollm2-135m-int4", kv_cache="fp16") == "fp16"
    assert fingerprint(client, "smollm2-135m-fp16") == "fp16"
    assert {fingerprint(client, "smollm2-135m", user=f"user {index}") for index in range(12)} == {"int4", "fp16"}


def test_every_monitored_metric_exists(client: openai.OpenAI, operated: RunningServer) -> None:
    """Dashboard and alert rules name only what the two metrics endpoints really show."""
    fingerprint(client, "smollm2-135m-int4")
    with pytest.raises(openai.NotFoundError):
        fingerprint(client, "none")
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = [
        rule for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
    ]
    named = {name for text in [*queries, *(rule["expr"] for rule in rules)] for name in METRIC.findall(text)}
    shown = operated.metrics_text + operated.front("/metrics")[1]
    existing = set(METRIC.findall(shown))
    assert named
    assert named <= existing, f"not on any endpoint: {sorted(named - existing)}"
    assert all({"summary", "runbook"} <= rule["annotations"].keys() for rule in rules)
    runbook = (REPOSITORY_ROOT / "docs" / "operations.md").read_text()
    for rule in rules:
        (title,) = re.findall(r'"(.+)"', rule["annotations"]["runbook"])
        assert title in runbook, rule["alert"]


def test_live_fallback_moves_new_requests_and_ends_old_ones(client: openai.OpenAI, operated: RunningServer) -> None:
    stubs = stubs_of(operated.triton.pid)
    stream = operated.llm.stream("Once", max_tokens=160, ignore_eos=True)
    chunks = [next(stream)]
    control = find_server(operated.port)
    control.fall_back("fp16")
    moved = operated.llm.generate("Two and two", max_tokens=2)
    assert (moved.kv_format, "live fallback" in moved.kv_fallback_reason) == ("fp16", True)
    chunks += list(stream)
    assert (chunks[-1].generated_tokens, chunks[-1].kv_format) == (160, "int4")
    wait_for(lambda: len(stubs_of(operated.triton.pid)) == len(stubs), 60, "the old engine to leave")
    assert operated.metric("nibble_kv_info", engine="llm", kv="int4") == 0
    wait_for(lambda: fingerprint(client, "smollm2-135m-int4") == "fp16", 60, "the front to know")
    control.fall_back("none")
    assert operated.llm.generate("Two and two", max_tokens=2).kv_format == "int4"
    assert operated.output.count("restarting") == 0


def test_hung_stub_is_found_and_replaced(operated: RunningServer) -> None:
    times_ready = operated.output.count("ready after")
    stub = stubs_of(operated.triton.pid)[0]
    os.kill(stub.pid, signal.SIGSTOP)
    operated.wait_ready(times_ready + 1)
    assert "hangs" in operated.output
    assert not stub.is_alive
    operated.wait_front()
    events = [json.loads(line) for line in Path(str(operated.settings.events_path)).read_text().splitlines()]
    assert "hangs" in [event for event in events if event["event"] == "restart"][-1]["reason"]


def test_killed_server_breaks_streams_with_an_error_and_comes_back(
    client: openai.OpenAI, operated: RunningServer
) -> None:
    times_ready = operated.output.count("ready after")
    restarts = float(re.findall(r"^nibble_server_restarts (\S+)", operated.front("/metrics")[1], re.MULTILINE)[0])
    stream = client.completions.create(
        model="smollm2-135m-int4", prompt="Once", max_tokens=450, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    killed = time.monotonic()
    os.kill(operated.triton.pid, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="can't answer"):
        list(stream)
    with pytest.raises(openai.InternalServerError) as refused:
        fingerprint(client, "smollm2-135m-int4")
    assert refused.value.code == "server_unavailable"
    operated.wait_ready(times_ready + 1)
    operated.wait_front()
    assert time.monotonic() - killed < 60
    assert fingerprint(client, "smollm2-135m-int4") == "int4"
    assert f"nibble_server_restarts {restarts + 1}" in operated.front("/metrics")[1]


def test_killed_front_is_replaced(operated: RunningServer) -> None:
    front = operated.record.front
    assert front is not None
    os.kill(front.pid, signal.SIGKILL)
    wait_for(lambda: "the OpenAI front ended" in operated.output, 60, "the front to be missed")
    operated.wait_front()
    assert operated.record.front != front
