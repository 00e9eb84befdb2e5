"""Folders and files appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from nibble import atomic


def test_a_new_directory_appears_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "engine"
    with atomic.new_directory(target) as workspace:
        (workspace / "a").write_text("a", encoding="utf-8")
        assert not target.exists()
    assert (target / "a").read_text(encoding="utf-8") == "a"
    assert list(tmp_path.iterdir()) == [target]


def test_a_failed_directory_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "engine"
    target.mkdir()
    (target / "old").touch()
    with pytest.raises(FileNotFoundError), atomic.new_directory(target) as workspace:
        (workspace / "missing" / "new").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["engine", "old"]


def test_leftovers_of_a_killed_process_are_swept(tmp_path: Path) -> None:
    for name in (".engine.new", ".engine.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").touch()
    with atomic.new_directory(tmp_path / "engine") as workspace:
        assert not list(workspace.iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "file"
    atomic.write_text(target, "old")
    with pytest.raises(TypeError):
        atomic.write_bytes(target, None)  # type: ignore[arg-type]
    assert target.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [target]
