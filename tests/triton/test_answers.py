"""Answers of the real server: over gRPC and HTTP, streamed and not, alone and together."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from nibble.runtime import Completion, Engine, SamplingParams
from tests.triton.running_server import LOG_PROB_TOLERANCE, RunningServer, wait_for

PROMPT = "The capital of France is"
CHAT = [{"role": "user", "content": "Name three colours."}]
TOPICS = ["rivers", "trains", "bread", "winter", "music", "bees", "ships", "chess"]


def in_process(engine: Engine, prompt: str, **params: Any) -> Completion:
    (answer,) = engine.generate([engine.encode(prompt)], SamplingParams(**params))
    return answer


def post(url: str, fields: dict[str, Any]) -> bytes:
    request = urllib.request.Request(url, data=json.dumps(fields).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bytes(answer.read())


def test_ready_says_what_it_serves(server: RunningServer) -> None:
    wait_for(lambda: "Ctrl-C stops the server" in server.output, 10, "the endpoints to be printed")
    assert f"127.0.0.1:{server.port + 1}" in server.output
    assert "fallback" not in server.output.lower()


def test_grpc_stream_gives_the_engines_greedy_tokens(server: RunningServer, engine: Engine) -> None:
    expected = in_process(engine, PROMPT, max_tokens=24)
    chunks = list(server.llm.stream(PROMPT, max_tokens=24))
    assert [token for chunk in chunks for token in chunk.token_ids] == expected.token_ids
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert len(chunks) > len(expected.token_ids) // 2  # a stream: a token each, or what came at once
    last = chunks[-1]
    assert (last.finish_reason, last.kv_format, last.kv_fallback_reason) == (expected.finish_reason, "int4", "")
    assert last.prompt_tokens == expected.prompt_tokens
    assert last.generated_tokens == len(expected.token_ids)


def test_long_prompt_through_sealed_pages(server: RunningServer, engine: Engine) -> None:
    """Over 256 tokens: what is read is int4, and the answer is still the engine's."""
    prompt = "Rain fell on the old harbour while the boats came home. " * 24
    expected = in_process(engine, prompt, max_tokens=16)
    assert expected.prompt_tokens > 256
    assert list(server.llm.generate(prompt, max_tokens=16).token_ids) == expected.token_ids


def test_generate_is_one_response_with_log_probs(server: RunningServer, engine: Engine) -> None:
    expected = in_process(engine, PROMPT, max_tokens=8)
    answer = server.llm.generate(PROMPT, max_tokens=8, return_log_probs=True)
    assert list(answer.token_ids) == expected.token_ids
    assert answer.log_probs == pytest.approx(expected.logprobs, abs=LOG_PROB_TOLERANCE)


def test_http_generate(server: RunningServer) -> None:
    answer = json.loads(post(f"{server.url}/generate", {"text_input": PROMPT, "max_tokens": 8}))
    assert answer["text_output"] == server.llm.generate(PROMPT, max_tokens=8).text
    assert (answer["generated_tokens"], answer["kv_format"]) == (8, "int4")


def test_http_generate_stream(server: RunningServer) -> None:
    fields = {"text_input": PROMPT, "max_tokens": 8, "stream": True}
    lines = post(f"{server.url}/generate_stream", fields).decode().splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert len(events) == 8
    assert "".join(event["text_output"] for event in events) == server.llm.generate(PROMPT, max_tokens=8).text


def test_chat_template(server: RunningServer, engine: Engine) -> None:
    (expected,) = engine.generate([engine.encode_chat(CHAT)], SamplingParams(max_tokens=12))
    assert server.llm.generate(CHAT, max_tokens=12).text == expected.text


def test_eight_streams_are_not_mixed_up(server: RunningServer, engine: Engine) -> None:
    prompts = [f"Write one sentence about {topic}:" for topic in TOPICS]
    with ThreadPoolExecutor(len(prompts)) as pool:
        streams = pool.map(lambda prompt: list(server.llm.stream(prompt, max_tokens=16)), prompts)
    answers = ["".join(chunk.text for chunk in chunks) for chunks in streams]
    expected = engine.generate([engine.encode(prompt) for prompt in prompts], SamplingParams(max_tokens=16))
    assert answers == [completion.text for completion in expected]


def test_stop_words_end_the_answer(server: RunningServer) -> None:
    whole = server.llm.generate(PROMPT, max_tokens=24).text
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    chunks = list(server.llm.stream(PROMPT, max_tokens=24, stop_words=[stop, "never said"]))
    assert "".join(chunk.text for chunk in chunks) == whole[: whole.index(stop)]
    assert chunks[-1].finish_reason == "stop"


def test_seed_repeats_a_sampled_answer(server: RunningServer) -> None:
    sampled: dict[str, Any] = {"max_tokens": 16, "temperature": 1.0, "top_p": 0.95, "top_k": 50}
    first, second, other = (server.llm.generate(PROMPT, seed=seed, **sampled).text for seed in (1, 1, 2))
    assert first == second != other


def test_repeated_prompt_comes_from_the_prefix_cache(server: RunningServer) -> None:
    prompt = "A long story about a lighthouse and its keeper. " * 30
    hits = server.metric("nibble_prefix_hit_tokens_total")
    first, second = (server.llm.generate(prompt, max_tokens=4) for _ in range(2))
    assert second.cached_tokens > 0
    assert first.token_ids == second.token_ids
    wait_for(lambda: server.metric("nibble_prefix_hit_tokens_total") > hits, 10, "the hits to be published")
