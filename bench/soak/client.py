"""One client of the soak: makes a request over HTTP, and judges what came back.

An answer is right when it is the beginning of the golden one, of exactly the length asked for, with a last event that
says so. An error is right when the kind of request calls for it, or when it was told (a status or an error event) while
the server was being killed or full. Silence, a stream that just ends, or somebody else's tag is never right.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.soak.workload import REFUSED, Kind, Prompt, Task

PATIENCE_S = 120.0
BACK_OFF_S = 0.5  # what a client waits after an error that isn't its own
TOLD_WHILE_DOWN = (0, 500, 502, 503)  # 0: nobody listens, the front itself is being restarted


@dataclass
class Tally:
    """What happened, and every wrong thing with its reason."""

    done: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    told_errors: int = 0
    queue_full: int = 0


@dataclass(frozen=True)
class Answer:
    """What a client saw. status 0: no connection. complete: a last event or a whole body came."""

    status: int
    text: str = ""
    finish_reason: str | None = None
    tokens: int | None = None
    error: str | None = None
    complete: bool = False


class SoakClient:
    """Asks one front. is_disturbed: True while a fault is under way, when errors that are told count as right."""

    def __init__(self, url: str, model: str, prompts: list[Prompt], tally: Tally) -> None:
        self.url = url
        self.model = model
        self.tally = tally
        self.is_disturbed = False
        self._tags = [prompt.tag for prompt in prompts]
        self._golden: dict[str, str] = {}
        self._http = httpx.AsyncClient(
            base_url=url, timeout=PATIENCE_S, limits=httpx.Limits(max_keepalive_connections=0)
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def learn(self, prompts: list[Prompt], max_tokens: int) -> None:
        """Ask each prompt before the load, for the answers to compare with."""
        few = asyncio.Semaphore(4)

        async def ask(prompt: Prompt) -> None:
            async with few:
                answer = await self._ask(prompt, max_tokens, stream=False)
            assert answer.complete and answer.tokens == max_tokens, answer
            self._golden[prompt.tag] = answer.text

        await asyncio.gather(*(ask(prompt) for prompt in prompts))

    async def perform(self, task: Task) -> None:
        """Make the request of a task and judge the outcome."""
        disturbed_before = self.is_disturbed
        try:
            answer = await self._act(task)
        except httpx.TimeoutException:
            answer = Answer(status=-1)
        except (httpx.TransportError, OSError):
            answer = Answer(status=0)
        if answer is not None and _is_servers_error(answer) and task.kind not in REFUSED:
            await asyncio.sleep(BACK_OFF_S)
        problem = None if answer is None else self._judge(task, answer, disturbed_before or self.is_disturbed)
        self.tally.done[task.kind] += 1
        if problem:
            self.tally.wrong.append(f"{task.kind}: {problem}: {answer}")

    async def _act(self, task: Task) -> Answer | None:
        """None for a request that the client itself gave up."""
        if task.kind is Kind.CANCEL:
            return await self._leave(task, after_events=3)
        if task.kind is Kind.HANG_UP:
            return await self._hang_up(task)
        if task.kind in REFUSED:
            return await self._bad(task)
        stop = self._stop_string(task) if task.kind is Kind.STOP_STRING else None
        return await self._ask(task.prompt, task.max_tokens, stream=task.kind is not Kind.WHOLE, stop=stop)

    async def _ask(self, prompt: Prompt, max_tokens: int, *, stream: bool, stop: str | None = None) -> Answer:
        fields = self._fields(prompt.text, max_tokens)
        if stop:
            fields["stop"] = [stop]
        if not stream:
            response = await self._http.post("/v1/completions", json=fields)
            return _whole(response)
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
        async with self._http.stream("POST", "/v1/completions", json=fields) as response:
            if response.status_code != 200:
                await response.aread()
                return _whole(response)
            return await _events(response)

    async def _leave(self, task: Task, after_events: int) -> None:
        fields = {**self._fields(task.prompt.text, 400), "stream": True}
        async with self._http.stream("POST", "/v1/completions", json=fields) as response:
            seen = 0
            async for _ in response.aiter_lines():
                seen += 1
                if seen >= after_events:
                    return

    async def _hang_up(self, task: Task) -> None:
        """Send a request and close the socket without reading."""
        url = httpx.URL(self.url)
        _, writer = await asyncio.open_connection(url.host, url.port)
        body = json.dumps(self._fields(task.prompt.text, 400)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.close()

    async def _bad(self, task: Task) -> Answer:
        fields = self._fields(task.prompt.text, task.max_tokens)
        bodies = {
            Kind.MALFORMED: json.dumps(fields).encode()[:-2],
            Kind.INVALID_UTF8: json.dumps(fields).encode().replace(task.prompt.tag.encode(), b"\xff\xfe"),
            Kind.OVERSIZED: json.dumps({**fields, "prompt": "x" * (2 << 20)}).encode(),
            Kind.TOO_LONG: json.dumps({**fields, "prompt": task.prompt.text * 80}).encode(),
            Kind.BAD_VALUE: json.dumps({**fields, "temperature": -1}).encode(),
        }
        return _whole(await self._http.post("/v1/completions", content=bodies[task.kind]))

    def _judge(self, task: Task, answer: Answer, is_disturbed: bool) -> str | None:
        if answer.status == -1:
            return "no answer in time"
        if answer.error == "queue_full":
            self.tally.queue_full += 1
            return None
        if task.kind in REFUSED and (answer.status, answer.error) == REFUSED[task.kind]:
            return None
        if _is_servers_error(answer):
            self.tally.told_errors += 1
            return None if is_disturbed else "an error without a reason"
        if task.kind in REFUSED:
            return "not refused as it should be"
        if others := [tag for tag in self._tags if tag != task.prompt.tag and tag in answer.text]:
            return f"mixed up: has the tags {others} of others"
        return self._judge_text(task, answer)

    def _judge_text(self, task: Task, answer: Answer) -> str | None:
        golden = self._golden[task.prompt.tag]
        self.tally.tokens += answer.tokens or 0
        if not answer.complete or answer.finish_reason not in ("length", "stop"):
            return "truncated: no last event"
        if task.kind is Kind.STOP_STRING and answer.finish_reason == "stop":
            stop = self._stop_string(task)
            return None if answer.text == golden[: golden.find(stop)] else f"not cut at the stop string {stop!r}"
        if answer.tokens != task.max_tokens:
            return "truncated: fewer tokens than asked for"
        return None if golden.startswith(answer.text) else f"different from {golden[: len(answer.text)]!r}"

    def _stop_string(self, task: Task) -> str:
        """Three characters from the middle of the golden answer, across the border of two tokens or not."""
        golden = self._golden[task.prompt.tag]
        at = len(golden) // 3
        return golden[at : at + 3]

    def _fields(self, text: str, max_tokens: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": text,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }


def _is_servers_error(answer: Answer) -> bool:
    return bool(answer.error) or answer.status in TOLD_WHILE_DOWN


def _whole(response: httpx.Response) -> Answer:
    body = response.json()
    if "error" in body:
        return Answer(response.status_code, error=body["error"]["code"], complete=True)
    choice, usage = body["choices"][0], body["usage"]
    return Answer(200, choice["text"], choice["finish_reason"], usage["completion_tokens"], complete=True)


async def _events(response: httpx.Response) -> Answer:
    text, finish_reason, tokens, error, complete = "", None, None, None, False
    async for line in response.aiter_lines():
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            complete = True
        elif data:
            event = json.loads(data)
            if "error" in event:
                error = event["error"]["code"]
            elif event["choices"]:
                text += event["choices"][0]["text"]
                finish_reason = event["choices"][0]["finish_reason"] or finish_reason
            else:
                tokens = event["usage"]["completion_tokens"]
    return Answer(200, text, finish_reason, tokens, error, complete)
