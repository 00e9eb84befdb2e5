"""Prompt sets: files and datasets are read strictly, drawn by seed, and never padded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from calibrate.prompt_set import Prompt, PromptSet, encode_prompts, load_prompt_set
from nibble.errors import NibbleError
from nibble.models import load_tokenizer


def write(folder: Path, name: str, content: str) -> str:
    (folder / name).write_text(content, encoding="utf-8")
    return str(folder / name)


def test_jsonl_gives_text_and_category(tmp_path: Path) -> None:
    rows = [{"text": "Hello", "category": "chat", "id": 1}, {"text": "1 + 1"}]
    origin = write(tmp_path, "p.jsonl", "\n".join(map(json.dumps, rows)) + "\n")
    assert load_prompt_set(origin).prompts == (Prompt("Hello", "chat"), Prompt("1 + 1", "text"))


def test_text_gives_one_prompt_a_line(tmp_path: Path) -> None:
    origin = write(tmp_path, "p.txt", "one\n\n  two\n")
    assert [prompt.text for prompt in load_prompt_set(origin).prompts] == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", "", "holds no prompt"),
        ("p.txt", "\n \n", "holds no prompt"),
        ("p.jsonl", '{"text": "a"}\n{"text"\n', r"p\.jsonl line 2: not JSON"),
        ("p.jsonl", '{"prompt": "a"}\n', 'line 1: allowed an object whose key "text"'),
        ("p.jsonl", '{"text": " "}\n', 'line 1: allowed an object whose key "text"'),
        ("p.jsonl", '{"text": 3}\n', 'line 1: allowed an object whose key "text"'),
        ("p.jsonl", '["a"]\n', 'line 1: allowed an object whose key "text"'),
        ("p.csv", "a", r"allowed a \.jsonl file, a \.txt file, or owner/name of a hub dataset"),
    ],
)
def test_bad_prompt_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    with pytest.raises(NibbleError, match=message):
        load_prompt_set(write(tmp_path, name, content))


def test_a_missing_file_and_a_binary_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(NibbleError, match="can't be read"):
        load_prompt_set(str(tmp_path / "missing.jsonl"))
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(NibbleError, match="can't be read"):
        load_prompt_set(str(tmp_path / "b.txt"))


def fake_datasets(rows: list[dict[str, Any]] | Exception) -> ModuleType:
    def load_dataset(name: str, split: str, streaming: bool) -> SimpleNamespace:
        if isinstance(rows, Exception):
            raise rows
        return SimpleNamespace(take=lambda count: rows[:count])

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    return module


def test_hub_dataset_gives_its_first_text_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", fake_datasets([{"id": 1, "prompt": "Hi"}, {"id": 2, "prompt": " "}]))
    assert load_prompt_set("owner/data").prompts == (Prompt("Hi", "text"),)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (None, "pip install datasets"),
        (fake_datasets(ConnectionError("no route")), "owner/data can't be read: no route"),
        (fake_datasets([{"id": 1}]), "has the columns id; allowed one of text, prompt"),
    ],
)
def test_hub_dataset_errors_say_what_to_do(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType | None, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", module)
    with pytest.raises(NibbleError, match=message):
        load_prompt_set("owner/data")


def test_the_seed_alone_decides_the_draw() -> None:
    prompts = PromptSet("here", tuple(Prompt(str(i), "text") for i in range(50)))
    assert prompts.draw(10, seed=3) == prompts.draw(10, seed=3)
    assert prompts.draw(10, seed=3) != prompts.draw(10, seed=4)
    assert len(set(prompts.draw(50, seed=0))) == 50


@pytest.mark.parametrize("count", [0, -1, 4])
def test_drawing_more_than_there_are_is_refused(count: int) -> None:
    prompts = PromptSet("here", (Prompt("a", "text"),) * 3)
    with pytest.raises(NibbleError, match=f"got N={count}, allowed 1 to 3"):
        prompts.draw(count, seed=0)


def test_prompts_become_turns_cut_to_length(tiny_llama_dir: Path) -> None:
    tokenizer = load_tokenizer(tiny_llama_dir)
    short, long = encode_prompts([Prompt("a", "text"), Prompt("b" * 900, "text")], tokenizer, max_tokens=300)
    assert len(long) == 300
    assert tokenizer.decode(short) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"


def test_too_short_a_set_is_refused(tiny_llama_dir: Path) -> None:
    with pytest.raises(NibbleError, match=r"got \d+ tokens in 1 prompts, allowed at least 256"):
        encode_prompts([Prompt("a", "text")], load_tokenizer(tiny_llama_dir), max_tokens=100)
