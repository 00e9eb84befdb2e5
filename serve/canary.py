"""Canary inference: one token from each engine, to find a process that is alive but does not answer.

Triton goes on calling itself healthy while its model's process hangs. A canary that isn't answered is a sign of that,
unless the engine is merely busy: then its heartbeat (`nibble_steps_total`, which counts rounds of the engine thread,
idle ones too) goes on. A busy engine is given more time, not endless time.
"""

from __future__ import annotations

import re
import threading
import urllib.request
from collections.abc import Callable, Sequence

from nibble.errors import NibbleError
from serve.client import TritonLLM
from serve.tensors import CANARY_ID

CANARY_PROMPT = "1"
CANARY_PARAMETERS = {"max_tokens": 1, "priority": 1_000_000}
INTERVAL_S = 5.0
TIMEOUT_S = 10.0
WELL_REFUSED = ("queue:", "unknown model", "no available versions")
BEAT_S = 2.0  # an idle engine's heart beats once a second
BUSY_ROUNDS = 8  # canaries that may go unanswered in a row while the heartbeat goes on
HEARTBEAT = re.compile(r'^nibble_steps_total\{[^}]*engine="([^"]+)"[^}]*\} (\S+)$', re.MULTILINE)

Ask = Callable[[str], bool]
Heartbeat = Callable[[str], float]


class Canary:
    """Asks every engine in turn in a thread of its own. `failure` is what the supervisor reads."""

    def __init__(
        self,
        models: Sequence[str],
        ask: Ask,
        heartbeat: Heartbeat,
        *,
        interval_s: float = INTERVAL_S,
        beat_s: float = BEAT_S,
    ) -> None:
        """ask: True when the model answered in time. heartbeat: rounds of its engine thread, -1 when out of reach."""
        self._models = models
        self._ask = ask
        self._heartbeat = heartbeat
        self._interval_s = interval_s
        self._beat_s = beat_s
        self._stop = threading.Event()
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="canary", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask no more; a canary on its way is not waited for."""
        self._stop.set()

    def failure(self) -> str | None:
        """Why the server has to be restarted, or None."""
        return self._failure

    def _run(self) -> None:
        unanswered = dict.fromkeys(self._models, 0)
        while not self._stop.wait(self._interval_s):
            for model in self._models:
                before = self._heartbeat(model)
                if self._ask(model):
                    unanswered[model] = 0
                    continue
                unanswered[model] += 1
                self._stop.wait(self._beat_s)
                self._judge(model, unanswered[model], is_beating=self._heartbeat(model) > before >= 0)

    def _judge(self, model: str, unanswered: int, *, is_beating: bool) -> None:
        if not is_beating:
            self._failure = f"{model} hangs: no answer to a canary, and its engine stands still"
        elif unanswered > BUSY_ROUNDS:
            self._failure = f"{model} hangs: its engine turns, but {unanswered} canaries in a row got no answer"


def ask_model(url: str, model: str, timeout_s: float = TIMEOUT_S) -> bool:
    """One token from a model; True when there was an answer in time. A full queue is one, an unloaded model too.

    Not an answer: silence, and Triton's own word that the model's process is not healthy, which it says of a hung one.
    """
    try:
        TritonLLM(url, model=model, inactivity_timeout_s=timeout_s).generate(
            CANARY_PROMPT, request_id=CANARY_ID, **CANARY_PARAMETERS
        )
    except NibbleError as error:
        return any(word in str(error) for word in WELL_REFUSED)
    return True


def read_heartbeat(metrics_url: str, model: str, timeout_s: float = TIMEOUT_S) -> float:
    """The rounds of a model's engine thread so far; -1 when the metrics are out of reach."""
    try:
        with urllib.request.urlopen(metrics_url, timeout=timeout_s) as answer:  # noqa: S310
            text = answer.read().decode()
    except OSError:
        return -1.0
    return sum(float(value) for engine, value in HEARTBEAT.findall(text) if engine == model)
