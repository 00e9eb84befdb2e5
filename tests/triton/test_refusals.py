"""What the real server refuses, what a client learns, and that nobody else is harmed."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from nibble.errors import NibbleError
from serve.client import Chunk, ServerError, TritonLLM
from tests.triton.running_server import LIMITS, RunningServer, wait_for

BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 4}, "neither of text_input and messages"),
    ({"text_input": "", "max_tokens": 4}, "prompt: got no tokens"),
    ({"text_input": "a", "max_tokens": 0}, "max_tokens: got 0, allowed 1 or more"),
    ({"text_input": "a", "top_p": 2.0}, "top_p: got 2.0"),
    ({"text_input": "a", "max_token": 4}, "unknown input 'max_token'"),
    ({"text_input": ["a", "b"]}, "batch-size must be <= 1"),
    ({"messages": "[]"}, "at least one"),
    ({"text_input": "word " * 2000}, f"allowed up to {LIMITS.max_context}"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_REQUESTS)
def test_bad_request_over_http(server: RunningServer, fields: dict[str, Any], message: str) -> None:
    request = urllib.request.Request(f"{server.url}/generate", data=json.dumps(fields).encode())
    with pytest.raises(urllib.error.HTTPError) as failed:
        urllib.request.urlopen(request, timeout=30)
    assert failed.value.code == 400
    assert message in failed.value.read().decode()


def test_invalid_utf8_over_grpc(server: RunningServer) -> None:
    with pytest.raises(ServerError, match="stop_words: not valid UTF-8"):
        server.llm.generate("a", stop_words=[b"\xff"])


def test_bad_requests_do_not_touch_a_running_answer(server: RunningServer) -> None:
    alone = server.llm.generate("Once upon a time", max_tokens=40).text
    stream = server.llm.stream("Once upon a time", max_tokens=40)
    text = next(stream).text
    for _ in range(5):
        with pytest.raises(ServerError):
            server.llm.generate("a", max_tokens=-1)
    assert text + "".join(chunk.text for chunk in stream) == alone


def test_full_queue_refuses_some_and_serves_the_rest(server: RunningServer) -> None:
    def ask(index: int) -> Chunk | ServerError:
        try:
            return server.llm.generate(f"{index}:", max_tokens=24, ignore_eos=True)
        except ServerError as error:
            return error

    asked = 4 * (LIMITS.max_running + LIMITS.max_waiting)
    with ThreadPoolExecutor(asked) as pool:
        results = list(pool.map(ask, range(asked)))
    refused = [result for result in results if isinstance(result, ServerError)]
    served = [result for result in results if isinstance(result, Chunk)]
    assert refused
    assert all("queue" in str(error) for error in refused)
    assert len(served) >= LIMITS.max_waiting
    assert all(chunk.generated_tokens == 24 for chunk in served)


def test_leaving_a_stream_frees_its_pages(server: RunningServer) -> None:
    cancelled = server.metric("nibble_requests_total", finish_reason="cancelled")
    stream = server.llm.stream("Once", max_tokens=450, ignore_eos=True)
    next(stream)
    wait_for(lambda: server.metric("nibble_requests", state="running") == 1, 10, "the request to run")
    stream.close()
    wait_for(lambda: server.metric("nibble_requests", state="running") == 0, 10, "the request to be cancelled")
    assert server.metric("nibble_pages", state="used") == 0
    assert server.metric("nibble_requests_total", finish_reason="cancelled") == cancelled + 1


def test_http_client_that_hangs_up_is_cancelled(server: RunningServer) -> None:
    fields = {"text_input": "Once", "max_tokens": 450, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(f"{server.url}/generate_stream", data=json.dumps(fields).encode())
    answer = urllib.request.urlopen(request, timeout=30)
    assert answer.readline().startswith(b"data: ")
    wait_for(lambda: server.metric("nibble_requests", state="running") == 1, 10, "the request to run")
    answer.close()
    wait_for(lambda: server.metric("nibble_requests", state="running") == 0, 10, "the request to be cancelled")
    assert server.metric("nibble_pages", state="used") == 0


def test_metrics(server: RunningServer) -> None:
    before = {name: server.metric(f"nibble_{name}_seconds_count") for name in ("ttft", "tpot", "request")}
    generated = server.metric("nibble_generated_tokens_total")
    server.llm.generate("Two and two", max_tokens=6, ignore_eos=True)
    wait_for(lambda: server.metric("nibble_generated_tokens_total") >= generated + 6, 10, "tokens to be counted")
    assert server.metric_labels("nibble_kv_info") == {"kv": "int4", "engine": "llm", "fallback_reason": ""}
    for name, count in before.items():
        assert server.metric(f"nibble_{name}_seconds_count") == count + 1
    assert 0 < server.metric("nibble_kv_bytes_per_token") < server.metric("nibble_kv_bytes_per_token_fp16") / 3
    for pool in ("sealed", "open"):
        assert server.metric("nibble_pages", pool=pool, state="free") > 0


def test_client_says_what_it_could_not_reach() -> None:
    llm = TritonLLM("127.0.0.1:1", inactivity_timeout_s=10)
    assert not llm.is_ready()
    began = time.monotonic()
    with pytest.raises(NibbleError, match=r"127\.0\.0\.1:1: .*connect"):
        llm.generate("a")
    assert time.monotonic() - began < 60
