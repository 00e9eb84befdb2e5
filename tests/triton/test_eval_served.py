"""The evaluation's own check of a served endpoint, against the real server."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from eval.hosts import NativeHost, Prompt, TritonHost
from eval.served import check_served
from eval.windows import choose_windows
from nibble.runtime import Engine
from tests.triton.running_server import RunningServer


def test_the_served_endpoint_gives_the_engines_greedy_tokens(built_engine: Path, engine: Engine) -> None:
    windows = choose_windows(engine.tokenizer, count=1, window_tokens=512, seed=0).windows
    check = check_served(engine, built_engine, windows, Console(quiet=True))
    assert (check.outcome, check.prompts) == ("same", 1), check.detail


def test_a_server_scores_and_writes_as_its_engine_does(server: RunningServer, engine: Engine) -> None:
    served, native = TritonHost(server.llm.url), NativeHost(engine)
    prompts = [Prompt("The capital of France is", (), 4), Prompt("One, two, three,", ("\n",), 6)]
    written = native.generate_until(prompts)
    assert served.generate_until(prompts) == written
    pairs = [(prompt.text, text) for prompt, text in zip(prompts, written, strict=True)]
    for ours, theirs in zip(native.log_likelihood(pairs), served.log_likelihood(pairs), strict=True):
        assert theirs.log_likelihood == pytest.approx(ours.log_likelihood, abs=1e-2)
        assert theirs.is_greedy == ours.is_greedy  # text may be cut into other tokens than it was written in
    assert ours.is_greedy


def test_the_metrics_say_what_the_certificate_is_worth(server: RunningServer) -> None:
    assert server.metric("nibble_certificate") == 1
    assert server.metric("nibble_certificate", standing="valid") == 0  # nobody certified the tests' engine
