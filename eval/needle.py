"""Needle in a haystack by RULER's rules, in real text: depth x length, one key, many keys, many values.

    One of the special magic numbers for amber is: 4821.                       the needle, somewhere in a novel
    ... The special magic number for amber mentioned in the provided text is   the question, at the end

single: one needle. multikey: three more, for other keys. multivalue: four for the same key, at four depths; the figure
is the share of them that the answer has. An answer has a number when it stands in it (RULER's string match). Cells that
the fp16 engine fails say nothing of a cache and are not scored.

A model that reads nothing but the needle language (eval/needle_words.py) gets its haystacks in that: one for each
variant and length, in which several keys of each depth are asked for; `single` and `multikey`, since one greedy answer
can't have four values.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any

from eval.answers import Questions
from eval.hosts import Prompt
from eval.needle_words import ITEM_TOKENS, VARIANTS, Language, make_haystack
from eval.tasks.make import WORDS
from eval.windows import read_texts

ANSWER_TOKENS = {"single": 16, "multikey": 16, "multivalue": 48}
OTHER_NEEDLES = 3
QUESTION_TOKENS = 128  # kept free for needles, question and answer
SCORED_FROM = 0.99  # of fp16's recall in a cell: the model can do it at all
ASKED_OF_A_DEPTH = 4  # keys, in the needle language


@dataclass(frozen=True)
class Trial:
    """One question. depth: per cent of the text in front of the (first) needle. tokens: of the whole prompt, about."""

    variant: str
    tokens: int
    depth: int
    prompt: str
    answers: tuple[str, ...]
    answer_tokens: int


def make_trials(tokenizer: Any, lengths: list[int], depths: list[int], seed: int) -> list[Trial]:
    """One trial for each variant, length and depth, in the needle language several; the same seed gives the same."""
    if (language := Language.of(tokenizer)) is not None:
        rows = [(tokens, variant) for tokens in lengths for variant in VARIANTS[:2]]
        return [trial for tokens, variant in rows for trial in _word_trials(language, variant, tokens, depths, seed)]
    text = read_texts()[0].contents
    sentences = [
        part.strip() + "." for part in text[: 12 * max(lengths)].replace("\n", " ").split(". ") if part.strip()
    ]
    counts = [len(tokenizer(sentence, add_special_tokens=False)["input_ids"]) for sentence in sentences]
    trials = []
    for tokens in lengths:
        room, body = tokens - QUESTION_TOKENS, []
        for sentence, count in zip(sentences, counts, strict=True):
            room -= count
            if room < 0:
                break
            body.append(sentence)
        for variant in VARIANTS:
            trials += [
                _trial(variant, tokens, depth, body, random.Random(f"{seed} {variant} {depth}")) for depth in depths
            ]
    return trials


def _word_trials(language: Language, variant: str, tokens: int, depths: list[int], seed: int) -> list[Trial]:
    """Questions about one haystack, by depth. They share all of their text but the key, so its pages are read once."""
    haystack = make_haystack(language, variant, tokens, seed, depths)
    body = haystack.tokens[: haystack.questions[0].place - ITEM_TOKENS + 1]
    asked: dict[int, list[Trial]] = {depth: [] for depth in depths}
    for question in haystack.questions:
        ((value, depth),) = question.values
        question_tokens = haystack.tokens[question.place - ITEM_TOKENS + 1 : question.place]
        prompt, answers = language.text([*body, *question_tokens]), (language.text([value]),)
        asked[depth].append(Trial(variant, tokens, depth, prompt, answers, answer_tokens=1))
    return [trial for trials in asked.values() for trial in trials[:ASKED_OF_A_DEPTH]]


def questions_of(trials: list[Trial]) -> Questions:
    """What a host is asked for trials of one variant and length."""
    prompts = tuple(Prompt(trial.prompt, ("\n",), trial.answer_tokens) for trial in trials)
    return Questions(f"needles {trials[0].variant} {trials[0].tokens} {prompts_sha256(trials)[:12]}", prompts)


def prompts_sha256(trials: list[Trial]) -> str:
    """Of every haystack with its question."""
    return hashlib.sha256("\n".join(trial.prompt for trial in trials).encode()).hexdigest()


def recall(trials: list[Trial], said: list[str]) -> list[float]:
    """For every trial the share of its numbers that the answer has."""
    return [_share(trial, text) for trial, text in zip(trials, said, strict=True)]


def _share(trial: Trial, text: str) -> float:
    said = text.split() if trial.answer_tokens == 1 else text  # words, where an answer is one: v1 is not in v17
    return sum(answer in said for answer in trial.answers) / len(trial.answers)


def _trial(variant: str, tokens: int, depth: int, body: list[str], generator: random.Random) -> Trial:
    keys = generator.sample(WORDS, 1 + OTHER_NEEDLES)
    numbers = tuple(str(number) for number in generator.sample(range(1000, 10000), 1 + OTHER_NEEDLES))
    others = [generator.randint(0, 100) for _ in range(OTHER_NEEDLES)]
    told = [(depth, keys[0], numbers[0])]
    if variant == "multikey":
        told += list(zip(others, keys[1:], numbers[1:], strict=True))
    if variant == "multivalue":
        told += [(other, keys[0], number) for other, number in zip(others, numbers[1:], strict=True)]
    sentences = list(body)
    for place, key, number in sorted(told, reverse=True):
        sentences.insert(len(body) * place // 100, f"One of the special magic numbers for {key} is: {number}.")
    many = variant == "multivalue"
    asked, what, verb = "What is", "the special magic number", "is"
    if many:
        asked, what, verb = "What are all", "the special magic numbers", "are"
    told_of = f"for {keys[0]} mentioned in the provided text"
    question = f"{asked} {what} {told_of}? {what.capitalize()} {told_of} {verb}"
    instruction = "Some special magic numbers are hidden within the following text. Memorize them.\n"
    answers = numbers if many else numbers[:1]
    prompt = f"{instruction}{' '.join(sentences)}\n{question}"
    return Trial(variant, tokens, depth, prompt, answers, ANSWER_TOKENS[variant])
