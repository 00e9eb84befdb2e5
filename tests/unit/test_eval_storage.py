"""Runs are never overwritten, `latest` is always whole, and an interrupted run goes on where it stopped."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from eval.measures import PositionMeasures
from eval.partial import open_partial, partial_key
from eval.results import results_dir, store_run
from eval.windows import Window
from nibble.errors import NibbleError

CREATED = datetime(2026, 11, 30, 8, 15, 0, tzinfo=UTC)


def window(number: int) -> Window:
    return Window("text", number, (number, *range(8)))


def measures(seed: int) -> PositionMeasures:
    generator = np.random.default_rng(seed)
    return PositionMeasures(*(generator.exponential(1.0, 8) for _ in range(3)), generator.random(8) < 0.9)


def test_a_run_is_stored_under_its_stamp_and_latest_points_at_it(tmp_path: Path) -> None:
    run = store_run(tmp_path, CREATED, {"report.json": "{}"})
    assert run == tmp_path / "20261130T081500Z"
    assert (tmp_path / "latest" / "report.json").read_text() == "{}"
    assert (tmp_path / "latest").readlink() == Path(run.name)


def test_a_second_run_of_the_same_second_gets_its_own_folder(tmp_path: Path) -> None:
    first, second = (store_run(tmp_path, CREATED, {"report.json": text}) for text in ("1", "2"))
    assert (first / "report.json").read_text() == "1"
    assert second.name == "20261130T081500Z-2"
    assert (tmp_path / "latest").resolve() == second


def test_a_path_is_moved_into_the_run(tmp_path: Path) -> None:
    positions = tmp_path / "positions"
    positions.write_text("p")
    run = store_run(tmp_path / "results", CREATED, {"positions.jsonl": positions})
    assert (run / "positions.jsonl").read_text() == "p"
    assert not positions.exists()


def test_nothing_but_runs_and_latest_is_left(tmp_path: Path) -> None:
    store_run(tmp_path, CREATED, {"report.json": "{}"})
    assert {path.name for path in tmp_path.iterdir()} == {"20261130T081500Z", "latest"}


def test_results_may_be_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIBBLE_RESULTS", str(tmp_path))
    assert results_dir("m", "int4") == tmp_path / "m" / "int4"


def test_finished_windows_are_found_again(tmp_path: Path) -> None:
    with open_partial(tmp_path, "key") as partial:
        stored = partial.add(window(0), measures(0))
    with open_partial(tmp_path, "key") as partial:
        found = partial.measured(window(0))
        assert partial.measured(window(1)) is None
    assert found is not None
    for name in ("kl", "nll", "nll_fp16", "top1_same"):
        np.testing.assert_array_equal(getattr(found, name), getattr(stored, name))
    np.testing.assert_allclose(found.kl, measures(0).kl, rtol=1e-8)


@pytest.mark.parametrize("torn", ['{"window": "abc", "kl": [0.1, 0.', "\x00\x00", "[]", '{"window": "abc"}'])
def test_a_torn_line_is_measured_again(tmp_path: Path, torn: str) -> None:
    with open_partial(tmp_path, "key") as partial:
        partial.add(window(0), measures(0))
        with partial.path.open("a") as stream:
            stream.write(torn)
    with open_partial(tmp_path, "key") as partial:
        assert partial.measured(window(0)) is not None
        partial.add(window(1), measures(1))
    with open_partial(tmp_path, "key") as partial:
        assert partial.measured(window(0)) is not None
        assert partial.measured(window(1)) is not None


def test_a_second_process_is_told_to_wait(tmp_path: Path) -> None:
    with (
        open_partial(tmp_path, "key"),
        pytest.raises(NibbleError, match="allowed one at a time"),
        open_partial(tmp_path, "key"),
    ):
        pass
    with open_partial(tmp_path, "key"):
        pass


def test_the_key_depends_on_every_part() -> None:
    keys = {partial_key("a", "b"), partial_key("a", "c"), partial_key("b", "a"), partial_key("ab")}
    assert len(keys) == 4
