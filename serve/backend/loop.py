"""The engine thread: the only one that touches the engine and updates metrics.

    Triton's thread: ask() -> inbox     engine thread: inbox -> submit, step -> outbox, metrics     outbox: -> clients
                                 ^------------------------- clients that have gone -------------------------'

One thread, because the engine is single-threaded and because Triton's metric calls crash the server from two. A fault
in the engine itself ends the process: a served model that can't answer must not look healthy, and the supervisor
starts a new one.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from jinja2 import TemplateError

from nibble.errors import NibbleError
from nibble.runtime import Engine, QueueFullError
from serve.backend.answers import Answer
from serve.backend.metrics import EngineMetrics, RequestTimes
from serve.backend.outbox import Outbox
from serve.backend.requests import Question
from serve.tensors import CANARY_ID

PUBLISH_S = 0.25
IDLE_WAIT_S = 1.0


@dataclass(frozen=True)
class Ask:
    """A request on its way to the engine thread. question: what to ask, or the error that its inputs made."""

    question: Question | NibbleError
    answer: Answer
    client_id: str = ""
    times: RequestTimes = field(default_factory=RequestTimes)


@dataclass(frozen=True)
class Gone:
    """The client of a request has gone; it may have been answered in the meantime."""

    request_id: str


class EngineLoop:
    """Runs an engine for Triton. on_fault: called with a traceback when the engine raised; must end the process."""

    def __init__(self, engine: Engine, metrics: EngineMetrics, on_fault: Callable[[str], None]) -> None:
        self._engine = engine
        self._metrics = metrics
        self._on_fault = on_fault
        self._inbox: queue.SimpleQueue[Ask | Gone | None] = queue.SimpleQueue()
        self._outbox = Outbox(lambda request_id: self._inbox.put(Gone(request_id)), on_fault)
        self._open: dict[str, Ask] = {}
        self._ids = itertools.count()
        self._next_publish = 0.0
        self._rounds = 0
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._outbox.start()
        self._thread.start()

    def ask(self, ask: Ask) -> None:
        """Hand over a request from any thread; never blocks."""
        self._inbox.put(ask)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Fail what is still open and end the thread."""
        self._inbox.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        self._outbox.turn.take()
        try:
            while not self._is_stopping:
                self._take_inbox()
                self._step()
                self._rounds += 1
                self._publish()
        except Exception:
            self._end("the engine failed; the server restarts it, ask again")
            self._on_fault(traceback.format_exc())
            raise
        self._end("the server is stopping")
        self._metrics.withdraw()

    def _take_inbox(self) -> None:
        """Submit what has arrived; sleep here while there is nothing to do."""
        try:
            if not self._engine.has_work:
                with self._outbox.turn:
                    ask = self._inbox.get(timeout=IDLE_WAIT_S)
                self._take(ask)
            while True:
                self._take(self._inbox.get_nowait())
        except queue.Empty:
            pass

    def _take(self, ask: Ask | Gone | None) -> None:
        if ask is None:
            self._is_stopping = True
            return
        if isinstance(ask, Gone):
            if ask.request_id in self._open:
                self._engine.cancel(ask.request_id)
            return
        try:
            request_id = self._submit(ask)
        except NibbleError as error:
            code = "UNAVAILABLE" if isinstance(error, QueueFullError) else "INVALID_ARG"
            self._outbox.fail(ask.answer, code, str(error))
            self._metrics.count_finished("rejected")
        else:
            self._open[request_id] = ask
            self._outbox.open(request_id, ask.answer)

    def _submit(self, ask: Ask) -> str:
        question = ask.question
        if isinstance(question, NibbleError):
            raise question
        request_id = f"{ask.client_id or 'request'}#{next(self._ids)}"  # clients may use an id twice
        return self._engine.submit(self._prompt_ids(question), question.params, request_id, question.priority)

    def _prompt_ids(self, question: Question) -> list[int]:
        if question.messages is None:
            return self._engine.encode(question.text or "")
        try:
            return self._engine.encode_chat(question.messages)
        except TemplateError as error:
            raise NibbleError(f"messages: the model's chat template refuses them: {error}") from error

    def _step(self) -> None:
        events = self._engine.step(self._outbox.turn)
        if events:
            self._outbox.take(events)
        for event in events:
            ask = self._open[event.request_id]
            if ask.client_id != CANARY_ID:
                self._metrics.observe(event, ask.times)
            if event.finish_reason:
                del self._open[event.request_id]

    def _publish(self) -> None:
        """Metrics a few times a second, and always before falling idle."""
        now = time.monotonic()
        if now >= self._next_publish or not self._engine.has_work:
            self._next_publish = now + PUBLISH_S
            self._metrics.publish(self._engine.stats(), self._rounds)
            self._rounds = 0

    def _end(self, message: str) -> None:
        """Fail what is open, and wait until everything has been sent."""
        self._outbox.turn.give()
        self._outbox.fail_open(message)
        self._outbox.close()
        self._open.clear()
