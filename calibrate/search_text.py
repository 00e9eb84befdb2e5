"""Windows of calibration text for the format search: some to choose on, others to verify on. No evaluation text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from calibrate.prompt_set import PromptSet
from nibble.errors import NibbleError
from nibble.recipes import SearchRecipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class SearchWindows:
    """Token ids; both lists come from different prompts."""

    choose: list[list[int]]
    verify: list[list[int]]


def cut_search_windows(
    prompts: PromptSet, tokenizer: PreTrainedTokenizerBase, recipe: SearchRecipe, seed: int
) -> SearchWindows:
    """Prompts in the seed's order, joined, cut into windows of `window_tokens`, each after a BOS where there is one.

    Raises NibbleError when the prompts are too short.
    """
    start = starting_tokens(tokenizer)
    length, needed = recipe.window_tokens - len(start), recipe.windows + recipe.held_out
    windows: list[list[int]] = []
    row: list[int] = []
    for prompt in prompts.draw(len(prompts.prompts), seed):
        row += tokenizer(prompt.text + "\n\n", add_special_tokens=False, verbose=False)["input_ids"]
        if len(row) >= length:  # the rest of this prompt is dropped, so that no prompt is in two windows
            windows.append(start + row[:length])
            row = []
        if len(windows) == needed:
            return SearchWindows(windows[: recipe.windows], windows[recipe.windows :])
    raise NibbleError(
        f"format search: {prompts.origin} gives {len(windows)} windows of {recipe.window_tokens} tokens, {needed} are "
        "needed (windows and held_out of the KV recipe); give more prompts (PROMPTS=), or ask for fewer or shorter ones"
    )


def starting_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """BOS, where the tokenizer puts one in front of a text."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []
