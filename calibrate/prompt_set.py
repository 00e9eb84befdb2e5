"""Calibration prompts: from a JSONL file, a text file or a hub dataset to token ids.

    prompts.jsonl   one object a line with a "text" (and, if you like, a "category")
    prompts.txt     one prompt a line, empty lines skipped
    owner/name      a dataset of the hub, split "train", its first text column

Prompts are drawn by seed without repetition and run one by one, so that no padding ever enters a range.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nibble.errors import NibbleError
from nibble.hashing import json_sha256
from nibble.recipes import HUB_ID

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXT_COLUMNS = ("text", "prompt", "instruction", "question", "content")
SHORTEST_SET_TOKENS = 256
LARGEST_HUB_SET = 10_000


@dataclass(frozen=True)
class Prompt:
    """One text of the set and the kind of text it is."""

    text: str
    category: str


@dataclass(frozen=True)
class PromptSet:
    """All prompts of a file or dataset."""

    origin: str
    prompts: tuple[Prompt, ...]

    @property
    def sha256(self) -> str:
        return json_sha256([(prompt.text, prompt.category) for prompt in self.prompts])

    def draw(self, count: int, seed: int) -> list[Prompt]:
        """`count` different prompts, the same for the same seed. Raises NibbleError when there are not so many."""
        if not 1 <= count <= len(self.prompts):
            raise NibbleError(f"prompts: got N={count}, allowed 1 to {len(self.prompts)} (what {self.origin} holds)")
        return random.Random(seed).sample(self.prompts, count)


def load_prompt_set(origin: str) -> PromptSet:
    """Read a prompt set. Raises NibbleError: no such file, a bad line (named), nothing in it."""
    path = Path(origin).expanduser()
    if path.suffix == ".jsonl":
        prompts = tuple(_read_jsonl(path))
    elif path.suffix == ".txt":
        prompts = tuple(Prompt(line.strip(), "text") for line in _read_lines(path) if line.strip())
    elif HUB_ID.fullmatch(origin) and not path.exists():
        prompts = tuple(_read_hub_dataset(origin))
    else:
        raise NibbleError(
            f"prompts: got {origin!r}, allowed a .jsonl file, a .txt file, or owner/name of a hub dataset"
        )
    if not prompts:
        raise NibbleError(f"prompts: {origin} holds no prompt; give at least one non-empty text")
    return PromptSet(origin, prompts)


def encode_prompts(prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[list[int]]:
    """Token ids of each prompt, at most `max_tokens`; as a user's turn where the tokenizer has a chat template.

    Raises NibbleError when all of them together are too short to tell a range.
    """
    encoded = [_encode(prompt.text, tokenizer)[:max_tokens] for prompt in prompts]
    total = sum(map(len, encoded))
    if total < SHORTEST_SET_TOKENS:
        raise NibbleError(
            f"prompts: got {total} tokens in {len(prompts)} prompts, allowed at least {SHORTEST_SET_TOKENS}: ranges of "
            "so few tokens mean nothing; give more or longer prompts (N=, PROMPTS=)"
        )
    return encoded


def _encode(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if not tokenizer.chat_template:
        return list(tokenizer(text)["input_ids"])
    turn = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"])


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise NibbleError(f"prompts: {path} can't be read: {error}") from error


def _read_jsonl(path: Path) -> Iterator[Prompt]:
    for number, line in enumerate(_read_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise NibbleError(f"prompts: {path} line {number}: not JSON: {error}") from error
        if not isinstance(row, dict) or not isinstance(row.get("text"), str) or not row["text"].strip():
            raise NibbleError(f'prompts: {path} line {number}: allowed an object whose key "text" is a non-empty text')
        yield Prompt(row["text"], str(row.get("category", "text")))


def _read_hub_dataset(name: str) -> Iterator[Prompt]:
    try:
        import datasets
    except ImportError as error:
        raise NibbleError(
            f"prompts: {name} looks like a hub dataset, which needs the package `datasets`: run "
            "`pip install datasets`, or give a .jsonl or .txt file"
        ) from error
    try:
        rows = datasets.load_dataset(name, split="train", streaming=True).take(LARGEST_HUB_SET)
        yield from _hub_prompts(name, rows)
    except (OSError, ValueError, ConnectionError) as error:
        raise NibbleError(f"prompts: the hub dataset {name} can't be read: {error}") from error


def _hub_prompts(name: str, rows: Any) -> Iterator[Prompt]:
    for row in rows:
        column = next((column for column in TEXT_COLUMNS if isinstance(row.get(column), str)), None)
        if column is None:
            raise NibbleError(
                f"prompts: {name} has the columns {', '.join(row)}; allowed one of {', '.join(TEXT_COLUMNS)}"
            )
        if row[column].strip():
            yield Prompt(row[column], str(row.get("category", "text")))
