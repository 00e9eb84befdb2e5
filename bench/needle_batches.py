"""Text in the needle language (eval/needle_words.py) to train on and to calibrate with, and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from eval.needle_words import ASK, ITEM_TOKENS, LONGEST_FILLER, NEEDLE, SPECIAL, VALUES_OF_KEY, Language

MANY_VALUED = 0.2  # share of training sequences whose keys have several values


@dataclass(frozen=True)
class Batch:
    """tokens, is_answer: [sequences, tokens]; is_answer marks answers to questions."""

    tokens: torch.Tensor
    is_answer: torch.Tensor


def random_batch(
    language: Language, sequences: int, tokens: int, device: torch.device | str, generator: torch.Generator
) -> Batch:
    """Training text: needles, filler and questions mixed, a share of each drawn for every sequence anew."""
    shape = (sequences, max(8, tokens // ITEM_TOKENS))

    def uniform(*size: int) -> torch.Tensor:
        return torch.rand(size, device=device, generator=generator)

    kind = uniform(*shape)
    is_needle = kind < 0.02 + 0.5 * uniform(sequences, 1) ** 2
    is_needle[:, 0] = True
    told = is_needle.cumsum(1)
    is_needle &= told <= language.keys
    told = told.clamp_max(language.keys)
    is_ask = (kind > 0.9 - 0.3 * uniform(sequences, 1)) & ~is_needle
    order = (~is_needle).to(torch.int8).argsort(dim=1, stable=True)  # the items that are needles, first to last
    asked = order.gather(1, (uniform(*shape) * (told - is_needle.long())).long().clamp_(0, shape[1] - 1))
    source = torch.where(is_ask, asked, torch.arange(shape[1], device=device))
    key = _keys_of_items(language, told, uniform).gather(1, source)
    value = (uniform(*shape) * language.values).long().gather(1, source)
    items = (language.first_filler + (language.fillers * uniform(*shape, LONGEST_FILLER) ** 2).long()).contiguous()
    speaks = is_needle | is_ask
    said = torch.stack((torch.where(is_ask, ASK, NEEDLE), language.first_key + key, language.first_value + value), -1)
    items[..., :ITEM_TOKENS] = torch.where(speaks[..., None], said, items[..., :ITEM_TOKENS])
    lengths = torch.where(speaks, ITEM_TOKENS, 1 + (uniform(*shape) * LONGEST_FILLER).long())
    return _lay_out(items, lengths, is_ask, tokens)


def drill_batch(
    language: Language,
    sequences: int,
    tokens: int,
    needles: int,
    device: torch.device | str,
    generator: torch.Generator,
) -> Batch:
    """The plain lesson: needles, filler between them where there is room, then a question for each that fits.

    Every needle has a key of its own; in a share of the sequences four have one together. The answer counts the first
    time that a key is asked for.
    """
    slots = tokens // ITEM_TOKENS
    asked = min(needles, slots - needles)

    def shuffled(among: int) -> torch.Tensor:
        return torch.rand((sequences, among), device=device, generator=generator).argsort(1)

    owner = torch.arange(needles, device=device).expand(sequences, -1)
    is_many = torch.rand((sequences, 1), device=device, generator=generator) < MANY_VALUED
    owner = torch.where(is_many, owner // VALUES_OF_KEY, owner)
    keys = language.first_key + shuffled(language.keys)[:, :needles].gather(1, owner)
    values = language.first_value + torch.randint(language.values, keys.shape, device=device, generator=generator)
    picked = shuffled(needles)[:, :asked]
    body = slots - asked
    filler = torch.rand((sequences, body, ITEM_TOKENS), device=device, generator=generator) ** 2
    text = language.first_filler + (language.fillers * filler).long()
    places = shuffled(body)[:, :needles, None].expand(-1, -1, ITEM_TOKENS)
    text = text.scatter(1, places, torch.stack((torch.full_like(keys, NEEDLE), keys, values), -1))
    key = keys.gather(1, picked)
    questions = torch.stack((torch.full_like(key, ASK), key, values.gather(1, picked)), -1)
    is_repeated = (key[:, :, None] == key[:, None]).tril(-1).any(-1)
    marks = torch.zeros(sequences, slots, ITEM_TOKENS, dtype=torch.bool, device=device)
    marks[:, body:, -1] = ~is_repeated
    return Batch(torch.cat((text, questions), 1).flatten(1), marks.flatten(1))


def _keys_of_items(language: Language, told: torch.Tensor, uniform: Callable[..., torch.Tensor]) -> torch.Tensor:
    """The key of each item that is a needle, [sequences, items]. told: needles up to each item.

    Every needle has its own key; in a share of the sequences up to four needles, anywhere, have one together.
    """
    keys = uniform(len(told), language.keys).argsort(1)
    number = (told - 1).clamp_min(0)
    shuffled = (
        uniform(len(told), language.keys) + torch.arange(language.keys, device=told.device).ge(told[:, -1:])
    ).argsort(1)
    number = shuffled.gather(1, number)
    is_many = uniform(len(told), 1) < MANY_VALUED
    return keys.gather(1, torch.where(is_many, number // VALUES_OF_KEY, number))


def _lay_out(items: torch.Tensor, lengths: torch.Tensor, is_ask: torch.Tensor, tokens: int) -> Batch:
    """Items one after the other, cut at `tokens`."""
    within = torch.arange(items.shape[2], device=items.device)
    places = (lengths.cumsum(1) - lengths)[..., None] + within
    fits = (within < lengths[..., None]) & (places < tokens)
    answers = is_ask[..., None] & (within == ITEM_TOKENS - 1)
    places = torch.where(fits, places, tokens).flatten(1)  # what does not fit goes to a column that is cut off
    row = torch.full((len(items), tokens + 1), SPECIAL.index("<end>"), dtype=torch.long, device=items.device)
    marks = torch.zeros(len(items), tokens + 1, dtype=torch.bool, device=items.device)
    row.scatter_(1, places, items.flatten(1))
    marks.scatter_(1, places, answers.flatten(1))
    return Batch(row[:, :tokens], marks[:, :tokens])


def write_tokenizer(language: Language, folder: Path) -> None:
    """A word-level tokenizer of the language, as transformers loads it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(language.words())}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>").save_pretrained(folder)
