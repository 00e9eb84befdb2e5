"""The arithmetic of the bench through Triton, and its planning bench on a small case."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from bench.serving_clients import Times
from bench.serving_triton import Bench, build_parser, make_prompt, summarize
from bench.trtllm_step import time_case


def test_times_of_streams_become_figures() -> None:
    times = [Times(1.0, 1.1, 1.4, 4), Times(1.0, 1.3, 2.0, 2)]
    found = summarize(times, 4)
    assert found["ttft_p50_ms"] == pytest.approx(200) and found["ttft_p99_ms"] == pytest.approx(300)
    assert found["tpot_p50_ms"] == pytest.approx((100 + 700 / 3) / 2)
    assert found["tokens_per_s"] == pytest.approx(8) and found["tokens_per_response"] == pytest.approx(8 / 6)


def test_the_server_gets_the_limits_of_the_engine_beside_it() -> None:
    options: argparse.Namespace = build_parser().parse_args(["--engine", "E/m/int4", "--load", "8x100", "2x300"])
    assert options.load == [(8, 100), (2, 300)]
    bench = Bench(Path("E/m/int4"), 400, 8, 2)
    assert bench.names == ("m", "int4")
    assert bench.serve_arguments == ["--engine", "E/m/int4", "--context", "400", "--batch", "8", "--queue", "32"]
    assert make_prompt(40, 1) != make_prompt(40, 2) and len(make_prompt(40, 1)) == 40


def test_a_step_is_planned_and_timed() -> None:
    case = time_case(3, 130, torch.device("cpu"))
    assert case["batch"] == 3 and 0 < case["ms"]["median"] <= case["ms"]["longest"]
