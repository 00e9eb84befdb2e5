"""The OpenAI-compatible front over the real server, through the official client."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from nibble.runtime import Engine, SamplingParams
from tests.triton.running_server import LIMITS, LOG_PROB_TOLERANCE, RunningServer, wait_for

CHAT: Any = [{"role": "user", "content": "Name three colours."}]
PROMPT = "The capital of France is"


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    server.wait_front()
    return openai.OpenAI(base_url=server.front_url, api_key="none needed", max_retries=0, timeout=60)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2-135m-int4", "smollm2-135m"]
    assert client.models.retrieve("smollm2-135m-int4").owned_by == "nibblekv"


def test_chat_is_the_engines_answer(client: openai.OpenAI, engine: Engine) -> None:
    (expected,) = engine.generate([engine.encode_chat(CHAT)], SamplingParams(max_tokens=12, logprobs=2))
    answer = client.chat.completions.create(
        model="smollm2-135m", messages=CHAT, max_tokens=12, temperature=0, logprobs=True, top_logprobs=2
    )
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (expected.text, str(expected.finish_reason))
    assert answer.usage and answer.usage.prompt_tokens == expected.prompt_tokens
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert str(answer.system_fingerprint).startswith("int4-")
    assert choice.logprobs and choice.logprobs.content
    assert [token.logprob for token in choice.logprobs.content] == pytest.approx(
        expected.logprobs, abs=LOG_PROB_TOLERANCE
    )
    assert bytes(byte for token in choice.logprobs.content for byte in token.bytes or []).decode() == expected.text
    assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


def test_stream_with_stop_seed_and_usage(client: openai.OpenAI) -> None:
    fields: Any = {"model": "smollm2-135m", "messages": CHAT, "max_completion_tokens": 24, "seed": 3}
    whole = client.chat.completions.create(**fields).choices[0].message.content or ""
    stop = whole[len(whole) // 2 :][:3]
    events = list(
        client.chat.completions.create(**fields, stop=[stop], stream=True, stream_options={"include_usage": True})
    )
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert text == whole[: whole.index(stop)]
    assert [event.choices[0].finish_reason for event in events if event.choices][-1] == "stop"
    assert events[-1].usage and events[-1].usage.completion_tokens > 0


def test_completions_with_log_probs(client: openai.OpenAI, engine: Engine) -> None:
    (expected,) = engine.generate([engine.encode(PROMPT)], SamplingParams(max_tokens=6))
    answer = client.completions.create(
        model="smollm2-135m-int4", prompt=PROMPT, max_tokens=6, temperature=0, logprobs=1
    )
    (choice,) = answer.choices
    assert choice.text == expected.text
    assert choice.logprobs and "".join(choice.logprobs.tokens or []) == expected.text
    assert choice.logprobs.token_logprobs == pytest.approx(expected.logprobs, abs=LOG_PROB_TOLERANCE)


def test_eight_streams_are_not_mixed_up(client: openai.OpenAI, engine: Engine) -> None:
    prompts = [
        f"Write one sentence about {topic}:" for topic in ("bees", "rain", "iron", "jam", "ice", "cats", "oil", "sun")
    ]

    def ask(prompt: str) -> str:
        events = client.completions.create(
            model="smollm2-135m", prompt=prompt, max_tokens=12, temperature=0, stream=True
        )
        return "".join(event.choices[0].text for event in events)

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, prompts))
    expected = engine.generate([engine.encode(prompt) for prompt in prompts], SamplingParams(max_tokens=12))
    assert answers == [completion.text for completion in expected]


def test_errors_become_the_clients_exceptions(client: openai.OpenAI, server: RunningServer) -> None:
    def fails(kind: Any, **fields: Any) -> Any:
        with pytest.raises(kind) as failed:
            client.completions.create(**{"model": "smollm2-135m", "prompt": "a", "max_tokens": 4, **fields})
        return failed.value

    assert fails(openai.NotFoundError, model="gpt").code == "model_not_found"
    long = fails(openai.BadRequestError, prompt="word " * 2000)
    assert long.code == "context_length_exceeded"
    assert f"allowed up to {LIMITS.max_context}" in long.message
    assert fails(openai.BadRequestError, prompt="").param == "prompt"
    assert fails(openai.BadRequestError, extra_body={"kv_cache": "fp16"}).code == "kv_cache_not_served"
    assert fails(openai.BadRequestError, extra_body={"max_token": 1}).code == "unsupported_parameter"
    assert any('"error"' in line and "gpt" in line for line in server.request_log)


def test_leaving_a_stream_cancels_it(client: openai.OpenAI, server: RunningServer) -> None:
    stream = client.completions.create(
        model="smollm2-135m", prompt="Once", max_tokens=450, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    wait_for(lambda: server.metric("nibble_requests", state="running") >= 1, 10, "the request to run")
    stream.close()
    wait_for(lambda: server.metric("nibble_requests", state="running") == 0, 10, "the request to be cancelled")
    wait_for(lambda: any('"status": 499' in line for line in server.request_log), 10, "the log line")


def test_full_queue_is_a_503_that_says_when_to_come_back(client: openai.OpenAI) -> None:
    def ask(index: int) -> tuple[int, str | None, str | None]:
        try:
            client.completions.create(
                model="smollm2-135m", prompt=f"{index}:", max_tokens=16, extra_body={"ignore_eos": True}
            )
        except openai.InternalServerError as error:
            return error.status_code, error.code, error.response.headers.get("retry-after")
        return 200, None, None

    asked = 4 * (LIMITS.max_running + LIMITS.max_waiting)
    with ThreadPoolExecutor(asked) as pool:
        answers = list(pool.map(ask, range(asked)))
    assert set(answers) == {(200, None, None), (503, "queue_full", "1")}
    assert answers.count((200, None, None)) >= LIMITS.max_waiting
