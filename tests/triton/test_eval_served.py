"""The evaluation's own check of a served endpoint, against the real server."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from eval.served import check_served
from eval.windows import choose_windows
from nibble.runtime import Engine


def test_the_served_endpoint_gives_the_engines_greedy_tokens(built_engine: Path, engine: Engine) -> None:
    windows = choose_windows(engine.tokenizer, count=2, window_tokens=512, seed=0).windows
    check = check_served(engine, built_engine, windows, Console(quiet=True))
    assert (check.outcome, check.prompts) == ("same", 2), check.detail
