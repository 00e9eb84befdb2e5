"""The sending thread: the only one that talks to clients, so that the engine never waits for one.

    engine     | host work of a step |  waits for the GPU  | host work of a step | ...
    sender                           | responses, as many as fit
                                     ^ Turn

A response is handed to Triton's process through shared memory and waited for, as is the question whether a client has
gone. Both threads need the one interpreter, and one that has it keeps it for milliseconds or loses it at any call into
the GPU's library, so they take turns: responses leave while the engine has nothing to do but wait (docs/log.md has what
that is worth). What has come meanwhile for one client goes to it as one response: a sender that is behind sends fewer.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

from nibble.runtime import TokenEvent
from serve.backend.answers import Answer

CANCEL_POLL_S = 0.1  # how often each client is looked after
LEAST_POLL_S = 0.005  # from one client to the next: each costs a round trip to Triton's process
MOST_WAIT_S = 0.02  # that a token waits for its turn: an engine without a moment's rest must not keep it back

Task = Callable[[], object]


class Turn:
    """Whose turn it is. The engine's thread enters it as a context to let others go on, and takes it when it starts."""

    def __init__(self) -> None:
        self._others = threading.Event()
        self._others.set()

    def take(self) -> None:
        """Others wait from now on."""
        self._others.clear()

    def give(self) -> None:
        """Others may go on."""
        self._others.set()

    def wait(self, timeout_s: float) -> None:
        """Until others may go on, or the time is up."""
        self._others.wait(timeout_s)

    def __enter__(self) -> None:
        self.give()

    def __exit__(self, *exc_info: object) -> None:
        self.take()


class Waiting(NamedTuple):
    """Events of a request that are not sent yet. since: when the first of them came, on the monotonic clock."""

    since: float
    events: list[TokenEvent]


class Outbox:
    """Sends in the order of its calls.

    on_gone: told, in this thread, the id of a request whose client has gone. on_fault: called with a traceback when
    sending raised; must end the process.
    """

    def __init__(self, on_gone: Callable[[str], None], on_fault: Callable[[str], None]) -> None:
        self._on_gone = on_gone
        self._on_fault = on_fault
        self.turn = Turn()
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._streaming: dict[str, Answer] = {}  # whose client was looked after longest ago first
        self._ready: dict[str, Waiting] = {}  # who waits longest first
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._next_poll = 0.0

    def start(self) -> None:
        self._thread.start()

    def open(self, request_id: str, answer: Answer) -> None:
        """Watch from now on whether the client of a request has gone."""
        self._tasks.put(lambda: self._streaming.update({request_id: answer}))

    def take(self, events: Sequence[TokenEvent]) -> None:
        """Send what events of open requests make ready to be sent."""
        self._tasks.put(lambda: self._take(events))

    def fail(self, answer: Answer, code: str, message: str) -> None:
        """End a request that was never opened."""
        self._tasks.put(lambda: answer.fail(code, message))

    def fail_open(self, message: str) -> None:
        """End every open request with UNAVAILABLE."""
        self._tasks.put(lambda: self._fail_open(message))

    def close(self, timeout_s: float = 10.0) -> None:
        """Send what is left and end the thread."""
        self._tasks.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while self._round():
                self._look_for_gone()
        except Exception:
            self._on_fault(traceback.format_exc())
            raise

    def _round(self) -> bool:
        """Do what has come by now, then send to who has waited longest. False at the end.

        Without a first task there is a round all the same, so that clients are looked after.
        """
        tasks = [] if self._ready else self._wait_for_task()
        tasks += [self._tasks.get() for _ in range(self._tasks.qsize())]  # nobody else takes from it
        for task in tasks:
            if task is not None:
                task()
        if None in tasks:
            self._send_all()
            return False
        if self._ready:
            self._send()
        return True

    def _wait_for_task(self) -> list[Task | None]:
        """One task, or none by the time at which a client is to be looked after."""
        timeout_s = max(0.0, self._next_poll - time.monotonic()) if self._streaming else None
        try:
            return [self._tasks.get(timeout=timeout_s)]
        except queue.Empty:
            return []

    def _take(self, events: Sequence[TokenEvent]) -> None:
        now = time.monotonic()
        for event in events:
            self._ready.setdefault(event.request_id, Waiting(now, [])).events.append(event)

    def _send(self) -> None:
        """To who has waited longest, in turn, everything that has come for it."""
        request_id, waiting = next(iter(self._ready.items()))
        self.turn.wait(waiting.since + MOST_WAIT_S - time.monotonic())
        del self._ready[request_id]
        self._streaming[request_id].take(waiting.events)
        if waiting.events[-1].finish_reason:
            del self._streaming[request_id]

    def _send_all(self) -> None:
        while self._ready:
            self._send()

    def _fail_open(self, message: str) -> None:
        self._send_all()
        for answer in self._streaming.values():
            answer.fail("UNAVAILABLE", message)
        self._streaming.clear()

    def _look_for_gone(self) -> None:
        """One client at a time, in turn."""
        now = time.monotonic()
        if now < self._next_poll or not self._streaming:
            return
        self._next_poll = now + max(LEAST_POLL_S, CANCEL_POLL_S / len(self._streaming))
        request_id = next(iter(self._streaming))
        answer = self._streaming[request_id] = self._streaming.pop(request_id)
        if answer.is_cancelled:
            self._on_gone(request_id)
