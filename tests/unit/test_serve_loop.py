"""The engine thread with a fake engine: nobody's trouble reaches anybody else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from jinja2 import TemplateError

from nibble.errors import NibbleError
from nibble.runtime import SamplingParams, TokenEvent
from nibble.runtime.request import FinishReason
from serve.backend.answers import COUNTS, Answer, as_tensor
from serve.backend.loop import Ask, EngineLoop
from serve.backend.metrics import EngineMetrics
from serve.backend.outbox import Outbox
from serve.backend.requests import Question
from serve.client import read_chunk
from tests.unit.serve_fakes import FakeChannel, FakeEngine, new_family_class

END: dict[str, FinishReason | None] = {"a": None, "b": None, "c": FinishReason.LENGTH}
CLOSING = {"kv_format": "int4", "kv_fallback_reason": ""}
QUESTION = Question("abc", None, SamplingParams(max_tokens=4), stream=True, return_log_probs=False, priority=0)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60  # seconds: a machine may be busy with other tests
    while not condition():
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.002)


def response(values: dict[str, list[Any]]) -> Any:
    """A response as tritonclient gives it."""
    arrays = {name: as_tensor(name, items) for name, items in values.items()}
    return SimpleNamespace(as_numpy=arrays.get)


class Server:
    """An engine loop and ways to ask it."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.family = new_family_class()
        self.faults: list[str] = []
        metrics = EngineMetrics(self.family, "int4", None)
        self.loop = EngineLoop(self.engine, metrics, self._on_fault)  # type: ignore[arg-type]

    def _on_fault(self, trace: str) -> None:
        self.faults.append(trace)
        raise SystemExit  # what follows in the real server is the end of the process

    def ask(self, question: Question | NibbleError, channel: FakeChannel | None = None) -> FakeChannel:
        channel = channel or FakeChannel()
        self.loop.ask(Ask(question, Answer(channel, question, CLOSING), "id"))
        return channel

    def metric(self, name: str, **labels: str) -> float:
        return self.family.metrics[name, frozenset({"kv": "int4", "engine": "llm", **labels}.items())].value


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    server.loop.start()
    yield server
    server.loop.stop()


def test_stream_sends_every_token_once(server: Server) -> None:
    channel = server.ask(QUESTION)
    wait_for(lambda: channel.is_final)
    assert channel.text == "abca"
    assert [token for response in channel.sent for token in response["token_ids"]] == [97, 98, 99, 97]
    for response in channel.sent[1:-1]:  # what a client knows by itself is left out
        assert response.keys() == {"text_output", "token_ids"}
    first, last = channel.sent[0], channel.sent[-1]
    assert (first["prompt_tokens"], first["generated_tokens"]) == ([3], [len(first["token_ids"])])
    assert (last["prompt_tokens"], last["generated_tokens"], last["finish_reason"]) == ([3], [4], [b"length"])
    assert channel.sent[-1]["kv_format"] == [b"int4"]
    assert "output_log_probs" not in channel.sent[0]


def test_tokens_that_waited_for_the_sender_go_as_one_response() -> None:
    outbox, channels = Outbox(lambda _: None, pytest.fail), {name: FakeChannel() for name in "xyz"}
    for name, channel in channels.items():
        outbox.open(name, Answer(channel, QUESTION, CLOSING))
    for number, text in enumerate("abc", 1):
        for name in "xy":
            outbox.take([TokenEvent(name, number, text, generated_tokens=number, finish_reason=END[text])])
    end = TokenEvent("z", None, "", finish_reason=FinishReason.ERROR, error="bad thing")
    outbox.take([TokenEvent("z", 1, "a", generated_tokens=1), end])
    outbox.start()  # all of it has come before
    outbox.close()
    for name in "xy":
        (response,) = channels[name].sent
        assert (response["text_output"], response["token_ids"]) == ([b"abc"], [1, 2, 3])
        assert response["generated_tokens"] == [3] and channels[name].is_final
    assert [response["text_output"] for response in channels["z"].sent] == [[b"a"], [b""]]
    assert channels["z"].sent[-1]["error_message"] == [b"bad thing"]


def test_an_engine_that_never_lets_the_sender_rest_does_not_keep_tokens_back() -> None:
    outbox, channel = Outbox(lambda _: None, pytest.fail), FakeChannel()

    class Busy:
        """Whenever its task is done there is another one."""

        def fail(self, code: str, message: str) -> None:
            if not channel.sent:
                outbox.fail(self, code, message)  # type: ignore[arg-type]

    outbox.open("x", Answer(channel, QUESTION, CLOSING))
    outbox.take([TokenEvent("x", 1, "a", generated_tokens=1)])
    Busy().fail("", "")
    outbox.start()
    wait_for(lambda: bool(channel.sent))
    outbox.close()
    assert channel.text == "a"


def test_responses_leave_while_the_engine_waits_or_when_they_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.backend.outbox.MOST_WAIT_S", 3600.0)
    outbox, channel = Outbox(lambda _: None, pytest.fail), FakeChannel()
    outbox.open("x", Answer(channel, QUESTION, CLOSING))
    outbox.turn.take()
    outbox.start()
    outbox.take([TokenEvent("x", 1, "a", generated_tokens=1)])
    time.sleep(0.02)
    assert not channel.sent
    with outbox.turn:
        wait_for(lambda: channel.text == "a")
    monkeypatch.setattr("serve.backend.outbox.MOST_WAIT_S", 0.0)
    outbox.take([TokenEvent("x", 2, "b", generated_tokens=2)])
    wait_for(lambda: channel.text == "ab")
    outbox.close()


def test_a_client_adds_up_what_responses_leave_out() -> None:
    first = read_chunk(response({"text_output": ["a"], "token_ids": [1], **{name: [7] for name in COUNTS}}))
    middle = read_chunk(response({"text_output": ["bc"], "token_ids": [2, 3]}), first)
    assert (middle.prompt_tokens, middle.generated_tokens, middle.cached_tokens) == (7, 9, 7)


def test_without_stream_there_is_one_response(server: Server) -> None:
    channel = server.ask(replace(QUESTION, stream=False, return_log_probs=True))
    wait_for(lambda: channel.is_final)
    (response,) = channel.sent
    assert response["text_output"] == [b"abca"]
    assert response["token_ids"] == [97, 98, 99, 97]
    assert response["output_log_probs"] == [-0.5] * 4


def test_many_at_once_are_not_mixed_up(server: Server) -> None:
    texts = [chr(ord("a") + index) * 3 for index in range(8)]
    channels = [server.ask(replace(QUESTION, text=text)) for text in texts]
    wait_for(lambda: all(channel.is_final for channel in channels))
    assert [channel.text for channel in channels] == [text + text[0] for text in texts]


def test_bad_requests_fail_alone(server: Server) -> None:
    good = server.ask(replace(QUESTION, params=SamplingParams(max_tokens=200)))
    bad = server.ask(NibbleError("wrong"))
    empty = server.ask(replace(QUESTION, text=""))
    wait_for(lambda: bad.is_final and empty.is_final and good.is_final)
    assert bad.failures == [("INVALID_ARG", "wrong")]
    assert empty.failures == [("INVALID_ARG", "prompt: got no tokens, allowed 1 or more")]
    assert sum(len(response["token_ids"]) for response in good.sent) == 200
    wait_for(lambda: server.metric("nibble_requests_total", finish_reason="rejected") == 2)


def test_full_queue_is_unavailable(server: Server) -> None:
    server.engine.max_waiting = 0
    channel = server.ask(QUESTION)
    wait_for(lambda: channel.is_final)
    assert channel.failures == [("UNAVAILABLE", "queue is full")]


def test_template_error_is_the_clients(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(messages: object) -> list[int]:
        raise TemplateError("roles must alternate")

    monkeypatch.setattr(server.engine, "encode_chat", refuse)
    channel = server.ask(replace(QUESTION, text=None, messages=[{"role": "user", "content": "x"}]))
    wait_for(lambda: channel.is_final)
    assert channel.failures[0][0] == "INVALID_ARG"
    assert "roles must alternate" in channel.failures[0][1]


def test_abandoned_request_is_cancelled(server: Server) -> None:
    channel = FakeChannel()
    server.ask(replace(QUESTION, params=SamplingParams(max_tokens=10**9)), channel)
    wait_for(lambda: len(channel.sent) > 3)
    channel.cancelled = True
    wait_for(lambda: channel.is_final and not server.engine.has_work)
    wait_for(lambda: server.metric("nibble_pages", pool="sealed", state="used") == 0)


def test_error_after_the_first_response_travels_in_band(server: Server) -> None:
    channel = server.ask(replace(QUESTION, text="error"))
    wait_for(lambda: channel.is_final)
    assert not channel.failures
    assert channel.sent[-1]["finish_reason"] == [b"error"]
    assert channel.sent[-1]["error_message"] == [b"bad thing"]


def test_error_before_the_first_response_fails_the_request(server: Server) -> None:
    channel = server.ask(replace(QUESTION, text="error", stream=False))
    wait_for(lambda: channel.is_final)
    assert channel.failures == [("INTERNAL", "bad thing")]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_engine_fault_tells_everyone_and_ends_the_process(server: Server) -> None:
    other = server.ask(replace(QUESTION, params=SamplingParams(max_tokens=10**9)))
    wait_for(lambda: len(other.sent) > 0)
    crashed = server.ask(replace(QUESTION, text="crash"))
    wait_for(lambda: bool(server.faults))
    assert "boom" in server.faults[0]
    assert crashed.failures[0][0] == "UNAVAILABLE"
    assert other.sent[-1]["finish_reason"] == [b"error"]


def test_metrics(server: Server) -> None:
    channel = server.ask(QUESTION)
    wait_for(lambda: channel.is_final)
    wait_for(lambda: server.metric("nibble_generated_tokens_total") == 4)
    assert server.metric("nibble_kv_bytes_per_token") == 140
    assert server.metric("nibble_kv_info", fallback_reason="") == 1
    assert server.metric("nibble_requests_total", finish_reason="length") == 1
    key = frozenset({"kv": "int4", "engine": "llm"}.items())
    observed = [server.family.metrics[f"nibble_{name}_seconds", key].observed for name in ("ttft", "tpot", "request")]
    assert [len(values) for values in observed] == [1, 1, 1]
    assert all(values[0] >= 0 for values in observed)


def test_stop_ends_open_requests(server: Server) -> None:
    channel = server.ask(replace(QUESTION, params=SamplingParams(max_tokens=10**9)))
    wait_for(lambda: len(channel.sent) > 0)
    server.loop.stop()
    assert channel.sent[-1]["error_message"] == [b"the server is stopping"]
