"""The sending thread: the only one that talks to clients, so that the engine never waits for one.

A response is handed to Triton's process through shared memory and waited for, as is the question whether a client has
gone (docs/log.md has what that is worth). An engine on a GPU makes tokens faster than that: what has come meanwhile for
one client goes to it as one response, so that the thread never falls behind by more than one round of its clients.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable

from nibble.runtime import TokenEvent
from serve.backend.answers import Answer

CANCEL_POLL_S = 0.1

Task = Callable[[], object]


class Outbox:
    """Sends in the order of its calls.

    on_gone: told, in this thread, the id of a request whose client has gone. on_fault: called with a traceback when
    sending raised; must end the process.
    """

    def __init__(self, on_gone: Callable[[str], None], on_fault: Callable[[str], None]) -> None:
        self._on_gone = on_gone
        self._on_fault = on_fault
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._streaming: dict[str, Answer] = {}
        self._ready: dict[str, list[TokenEvent]] = {}  # taken, not sent yet
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._next_poll = 0.0

    def start(self) -> None:
        self._thread.start()

    def open(self, request_id: str, answer: Answer) -> None:
        """Watch from now on whether the client of a request has gone."""
        self._tasks.put(lambda: self._streaming.update({request_id: answer}))

    def take(self, event: TokenEvent) -> None:
        """Send what an event of an open request makes ready to be sent."""
        self._tasks.put(lambda: self._ready.setdefault(event.request_id, []).append(event))

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
        """Do what has come by now, then send: what comes during a round is the next one's. False at the end.

        Without a first task there is a round all the same, so that clients are looked after.
        """
        try:
            tasks = [self._tasks.get(timeout=CANCEL_POLL_S if self._streaming else None)]
        except queue.Empty:
            return True
        tasks += [self._tasks.get() for _ in range(self._tasks.qsize())]  # nobody else takes from it
        for task in tasks:
            if task is not None:
                task()
        self._send()
        return None not in tasks

    def _send(self) -> None:
        """Everything that has been taken, one response a request."""
        ready, self._ready = self._ready, {}
        for request_id, events in ready.items():
            self._streaming[request_id].take(events)
            if events[-1].finish_reason:
                del self._streaming[request_id]

    def _fail_open(self, message: str) -> None:
        self._send()
        for answer in self._streaming.values():
            answer.fail("UNAVAILABLE", message)
        self._streaming.clear()

    def _look_for_gone(self) -> None:
        now = time.monotonic()
        if now < self._next_poll:
            return
        self._next_poll = now + CANCEL_POLL_S
        for request_id, answer in self._streaming.items():
            if answer.is_cancelled:
                self._on_gone(request_id)
