"""The front over a fake Triton: who may ask, which engine answers, what goes wrong and what is told and logged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from nibble.errors import NibbleError
from serve.front.engines import parse_split
from serve.front.keys import Limits, hash_key, read_keys
from serve.front.settings import check_open
from tests.unit.front_fakes import FP16, INT4, FakeTriton, FrontUnderTest

Scenario = Callable[[FrontUnderTest], Awaitable[None]]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., FrontUnderTest]:
    """Runs a scenario against a front with these settings and gives the front back, for a look at its log."""

    def start(scenario: Scenario, models: dict[str, dict[str, str]] | None = None, **settings: Any) -> FrontUnderTest:
        async def main() -> FrontUnderTest:
            triton = FakeTriton(models or {"llm": INT4, "llm-fp16": FP16})
            async with FrontUnderTest(tmp_path, triton, **settings) as front:
                await scenario(front)
            return front

        return asyncio.run(asyncio.wait_for(main(), 20))

    return start


def error_of(answer: Any) -> tuple[int, str]:
    body = answer.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    return answer.status_code, body["code"]


def test_stream_events_and_usage(run: Callable[..., FrontUnderTest]) -> None:
    async def scenario(front: FrontUnderTest) -> None:
        body = {
            "model": "tiny-int4",
            "messages": [{"role": "developer", "content": "be"}, {"role": "user", "content": [text_part("a b")]}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
        }
        answer = await front.client.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert lines.pop() == "[DONE]"
        events = [json.loads(line) for line in lines]
        assert [event["choices"][0]["delta"].get("content") for event in events[:-1]] == ["", "a", "b"]
        assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, None, "stop"]
        assert events[1]["choices"][0]["logprobs"]["content"][0]["bytes"] == [97]
        assert (events[-1]["choices"], events[-1]["usage"]["total_tokens"]) == ([], 9)
        (asked,) = front.triton.asked
        assert asked[1] == [{"role": "system", "content": "be"}, {"role": "user", "content": "a b"}]
        assert (asked[0], asked[2], asked[3]["max_tokens"]) == ("llm", "mine-1", 64)

    log = run(scenario).log
    assert (log[-1]["request_id"], log[-1]["status"], log[-1]["generated_tokens"]) == ("mine-1", 200, 2)


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def test_errors_have_openais_shape(run: Callable[..., FrontUnderTest]) -> None:
    async def scenario(front: FrontUnderTest) -> None:
        assert error_of(await front.ask("a", model="other")) == (404, "model_not_found")
        assert error_of(await front.ask("refuse")) == (400, "context_length_exceeded")
        dead = await front.ask("dead")
        assert (error_of(dead), dead.headers["retry-after"]) == ((503, "server_unavailable"), "2")
        assert error_of(await front.ask("a", kv_cache="int8")) == (400, "kv_cache_not_served")
        assert error_of(await front.ask("a" * 3000)) == (413, "request_too_large")
        assert error_of(await front.client.get("/v2/nothing")) == (404, "not_found")
        assert error_of(await front.client.get("/v1/chat/completions"))[0] == 405
        assert error_of(await front.client.get("/v1/models/other")) == (404, "model_not_found")
        broken = await front.ask("a break b", stream=True)
        assert broken.status_code == 200
        assert "answer_ended_early" in broken.text
        assert "[DONE]" not in broken.text

    front = run(scenario, max_body_bytes=2000)
    assert "refuse" not in front.log_path.read_text(), "prompts must not be logged"


def test_keys_and_limits(run: Callable[..., FrontUnderTest], tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    alice = f"name: alice\n    sha256: {hash_key('secret')}\n    requests_per_minute: 2\n    max_priority: 5"
    bob = f"name: bob\n    sha256: {hash_key('other')}\n    concurrent: 1"
    keys.write_text(f"keys:\n  - {alice}\n  - {bob}\n")

    async def scenario(front: FrontUnderTest) -> None:
        assert error_of(await front.ask("a")) == (401, "invalid_api_key")
        assert error_of(await front.ask("a", {"authorization": "Bearer wrong"})) == (401, "invalid_api_key")
        assert (await front.client.get("/v1/models")).status_code == 401
        key = {"authorization": "Bearer secret"}
        assert (await front.ask("a", key, priority=9)).status_code == 200
        assert front.triton.asked[-1][3]["priority"] == 5
        assert (await front.ask("a", key)).status_code == 200
        late = await front.ask("a", key)
        assert (error_of(late), int(late.headers["retry-after"]) > 20) == ((429, "rate_limit_exceeded"), True)
        other = {"authorization": "Bearer other"}
        first = asyncio.create_task(front.ask("wait", other))
        await asyncio.sleep(0.05)
        assert error_of(await front.ask("a", other)) == (429, "rate_limit_exceeded")
        front.triton.release.set()
        assert (await first).status_code == 200
        assert (await front.ask("a", other)).status_code == 200

    front = run(scenario, key_file=keys)
    assert {line.get("key") for line in front.log if line["event"] == "request"} == {None, "alice", "bob"}
    assert "secret" not in front.log_path.read_text()


def test_engines_side_by_side(run: Callable[..., FrontUnderTest]) -> None:
    async def scenario(front: FrontUnderTest) -> None:
        async def fingerprint(**fields: Any) -> str:
            return str((await front.ask("a", **fields)).json()["system_fingerprint"]).split("-")[0]

        assert await fingerprint(model="tiny-int4") == "int4"
        assert await fingerprint(model="tiny-int4", kv_cache="fp16") == "fp16"
        assert await fingerprint(model="tiny-fp16") == "fp16"
        shares = [await fingerprint(user=f"user {index}") for index in range(60)]
        assert 5 < shares.count("fp16") < 35
        again = [await fingerprint(user=f"user {index}") for index in range(60)]
        assert shares == again, "a user stays on one side"
        listed = (await front.client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["tiny-int4", "tiny-fp16", "tiny"]

    run(scenario, split={"int4": 0.7, "fp16": 0.3})


def test_client_that_leaves_is_cancelled_and_released(run: Callable[..., FrontUnderTest]) -> None:
    async def scenario(front: FrontUnderTest) -> None:
        for stream in (True, False):
            leaving = asyncio.Event()
            body = json.dumps({"model": "tiny", "prompt": "a wait b", "stream": stream}).encode()
            messages = iter([{"type": "http.request", "body": body, "more_body": False}])

            async def receive(messages: Any = messages, leaving: asyncio.Event = leaving) -> dict[str, Any]:
                if (message := next(messages, None)) is not None:
                    return dict(message)
                await leaving.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                pass

            scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
            before = front.triton.cancelled
            call = asyncio.create_task(front.app({**scope, "app": front.app}, receive, send))
            await asyncio.sleep(0.05)
            leaving.set()
            await asyncio.wait_for(call, 5)
            assert front.triton.cancelled == before + 1
        assert (await front.ask("a")).status_code == 200, "the one place was released"

    front = run(scenario, limits=Limits(concurrent=1))
    assert [line["status"] for line in front.log if line["event"] == "request"] == [499, 499, 200]


def test_readiness_and_metrics_follow_the_canary(run: Callable[..., FrontUnderTest]) -> None:
    async def scenario(front: FrontUnderTest) -> None:
        assert (await front.client.get("/health/ready")).json()["engines"] == {"tiny-int4": "int4", "tiny-fp16": "fp16"}
        assert "nibble_front_ready 1.0" in (await front.client.get("/metrics")).text
        front.triton.models.clear()
        await front.ask("dead")  # tells the front to look now
        while (await front.client.get("/health/ready")).status_code == 200:
            await asyncio.sleep(0.01)
        assert (await front.client.get("/health/live")).status_code == 200
        assert "nibble_front_ready 0.0" in (await front.client.get("/metrics")).text
        assert error_of(await front.ask("a")) == (503, "server_unavailable")

    run(scenario)


BAD_FILES = [
    ("keys: []", "keys"),
    ("keys:\n  - {name: a, sha256: short}", "sha256"),
    (f"keys:\n  - {{name: a, sha256: {'a' * 64}}}\n  - {{name: a, sha256: {'b' * 64}}}", "same name"),
]


@pytest.mark.parametrize(("text", "message"), BAD_FILES)
def test_bad_key_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(NibbleError, match=message):
        read_keys(path)


def test_splits_and_open_addresses() -> None:
    assert parse_split("int4=90, fp16=10") == {"int4": 90, "fp16": 10}
    for bad in ("int4", "int4=-1", "=1", "int4=0", "int4=nan"):
        with pytest.raises(NibbleError, match="split"):
            parse_split(bad)
    check_open("127.0.0.1", None, is_open=False)
    check_open("0.0.0.0", None, is_open=True)
    with pytest.raises(NibbleError, match="no API keys"):
        check_open("0.0.0.0", None, is_open=False)
