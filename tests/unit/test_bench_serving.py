"""The clients of the serving bench, over a tiny engine on a CPU."""

from __future__ import annotations

import pytest
import torch

from bench import serving_load
from bench.serving_engine import prime
from bench.serving_load import ENDLESS, Load, run_clients, run_long_prompt, step_a_few_times
from bench.serving_records import percentile
from tests.unit.runtime_cases import make_engine


def test_clients_ask_again_until_all_rounds_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    values = run_clients(make_engine(device="cpu"), Load(70, 5, 2, 2))
    assert (values["input"], values["output"], values["concurrency"], values["max_running"]) == (70, 5, 2, 2)
    assert all(isinstance(values[key], float) and values[key] > 0 for key in ("tokens_per_s", "itl_p99_ms"))
    assert values["ttft_p99_ms"] >= values["ttft_p50_ms"] > values["itl_p50_ms"]  # type: ignore[operator]


def test_a_long_prompt_is_read_beside_a_primed_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_load, "LONG_PROMPT", 500)
    engine = make_engine(device="cpu", chunk_tokens=64)
    for pool in (*engine.runner.backend.storage.open, *engine.runner.backend.storage.sealed):  # type: ignore[attr-defined]
        pool.zero_()
    assert prime(engine, [200, 130], ENDLESS) == 2
    for seed in (1, 2):
        step_a_few_times(engine)
        assert run_long_prompt(engine, seed)["output"] == 9  # 62 tokens of the prompt a step, beside two that decode
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
