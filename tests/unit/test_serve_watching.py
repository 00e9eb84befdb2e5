"""What decides over a restart: the canary's verdict and the restart policy. Nothing here waits for a clock."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nibble.errors import NibbleError
from serve.canary import BUSY_ROUNDS, Canary
from serve.json_log import JsonLog
from serve.restarts import RestartPolicy


def verdict(ask: Callable[[str], bool], heartbeat: Callable[[str], float], rounds: int) -> str | None:
    """What a canary says after it has asked at least `rounds` times."""
    asked = itertools.count(1)
    done: list[int] = []

    def counted(model: str) -> bool:
        done.append(next(asked))
        return ask(model)

    canary = Canary(["llm"], counted, heartbeat, interval_s=0.0005, beat_s=0.0005)
    canary.start()
    deadline = time.monotonic() + 60  # seconds: a machine may be busy with other tests
    while len(done) <= rounds and canary.failure() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    canary.stop()
    return canary.failure()


def test_canary_that_is_answered() -> None:
    assert verdict(lambda model: True, lambda model: 1.0, 20) is None


def test_canary_without_an_answer_and_without_a_heartbeat() -> None:
    assert "stands still" in str(verdict(lambda model: False, lambda model: 1.0, 3))
    assert "stands still" in str(verdict(lambda model: False, lambda model: -1.0, 3))


def test_busy_engine_gets_time_but_not_endless_time() -> None:
    beats = itertools.count()
    answers = itertools.cycle([False] * BUSY_ROUNDS + [True])
    assert verdict(lambda model: next(answers), lambda model: float(next(beats)), 3 * BUSY_ROUNDS) is None
    assert "turns, but" in str(verdict(lambda model: False, lambda model: float(next(beats)), 3 * BUSY_ROUNDS))


def test_restarts_come_later_and_later_and_end() -> None:
    policy = RestartPolicy("it", most=6, window_s=300, longest_s=10)
    assert [policy.next_delay_s("why", now=float(second)) for second in range(6)] == [0, 1, 2, 4, 8, 10]
    with pytest.raises(NibbleError, match="gave up on it after 6 restarts in 300 s: why"):
        policy.next_delay_s("why", now=10.0)
    assert policy.next_delay_s("why", now=1000.0) == 0
    assert policy.total == 7


def test_log_lines_are_json(tmp_path: Path) -> None:
    log = JsonLog(tmp_path / "events.jsonl")
    log.write("restart", reason='quote " and\nnewline', delay_s=0, missing=None)
    log.close()
    line = json.loads((tmp_path / "events.jsonl").read_text())
    assert {key: line[key] for key in line if key != "time"} == {
        "event": "restart",
        "reason": 'quote " and\nnewline',
        "delay_s": 0,
    }
