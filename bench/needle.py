"""Recall of the needle model by cache format, length and depth: bench/results/needle.json.

    python -m bench.needle bench/needle_model --out bench/results/needle.json        one GPU, a minute

Three haystacks, by RULER's kinds: `single`, needles that are asked for and filler between them; `multikey`, half of
the rest are needles that nobody asks for; `multivalue`, keys with four values in different places. Questions come last,
one after the other. A value is recalled when it is the most likely answer, or, of four values, among the four most
likely. Text, needles and questions are the same for every format; a cell counts where fp16 recalls nine in ten.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.needle_language import ASK, ITEM_TOKENS, LONGEST_FILLER, VALUES_OF_KEY, Language, random_batch
from bench.quality_attention import HOOK
from bench.quality_measure import Bench
from bench.quality_schemes import Scheme
from bench.quality_table import OURS, PEERS, STATIC

VARIANTS = ("single", "multikey", "multivalue")
DEPTHS = tuple(range(0, 101, 10))  # per cent of the text before the questions
LENGTHS = {1024: 6, 4096: 4, 16384: 3, 32768: 2}  # tokens: haystacks of each variant
SCORED_FROM = 0.9  # recall of fp16 in a cell
NAMES = {
    "int4-balanced": "int4",  # what `make engine` builds
    "int4": "int4, K as the model gives it",
    "static balanced-static 2.75": "int4-static",
    "int4-static": "int4-static, plain",
    "int4 per token": "per-token int4",
    "int4 rotated K per token": "per-token int4, K rotated",
}
FIRST = ["fp16", "int8", "int4-balanced", "static balanced-static 2.75", "int4 per token", "int4", "k8v4"]


@dataclass(frozen=True)
class Question:
    """place: of the answer in the text. values: token and depth of every needle of the key, one or four."""

    place: int
    values: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Haystack:
    """tokens: the text and its questions, each with an answer."""

    tokens: list[int]
    questions: list[Question]


def make_haystack(language: Language, variant: str, tokens: int, seed: int) -> Haystack:
    """A text of exactly `tokens` tokens that ends in questions, four to eight needles for every depth."""
    generator = random.Random(f"{variant} {tokens} {seed}")
    per_depth = 4 if tokens < 2048 else 8
    each = VALUES_OF_KEY if variant == "multivalue" else 1
    depths = list(DEPTHS * per_depth)
    generator.shuffle(depths)
    spare = generator.sample(range(language.keys), language.keys)
    keys, spare = spare[: len(depths) // each], spare[len(depths) // each :]
    told = [(depth, keys[at // each], generator.randrange(language.values)) for at, depth in enumerate(depths)]
    length = tokens - ITEM_TOKENS * len(keys)
    body = _body(language, sorted(told), iter(spare if variant == "multikey" else []), length, generator)
    questions = []
    for key in generator.sample(keys, len(keys)):
        values = tuple((language.first_value + value, depth) for depth, owner, value in told if owner == key)
        questions.append(Question(len(body) + ITEM_TOKENS - 1, values))
        body += [ASK, language.first_key + key, values[0][0]]
    return Haystack(body, questions)


def _body(
    language: Language,
    told: list[tuple[int, int, int]],
    spare: Iterator[int],
    tokens: int,
    generator: random.Random,
) -> list[int]:
    """Needles (depth, key, value) at their depths, and between them filler and needles of spare keys."""
    body: list[int] = []
    room = tokens - ITEM_TOKENS * len(told)
    for number, (depth, key, value) in enumerate(told):
        until = room * depth // 100 + ITEM_TOKENS * number
        body += _between(language, until - len(body), spare, generator) + language.needle(key, value)
    return body + _between(language, tokens - len(body), spare, generator)


def _between(language: Language, tokens: int, spare: Iterator[int], generator: random.Random) -> list[int]:
    text: list[int] = []
    while len(text) < tokens:
        key = next(spare, None) if tokens - len(text) >= ITEM_TOKENS else None
        if key is not None:
            text += language.needle(key, generator.randrange(language.values))
        text += language.filler(generator, min(generator.randint(1, LONGEST_FILLER), tokens - len(text)))
    return text


class Needles:
    """The model with its calibration samples."""

    def __init__(self, model: PreTrainedModel, language: Language) -> None:
        device = model.device
        generator = torch.Generator(device).manual_seed(7)
        calibration = random_batch(language, 8, 1024, device, generator).tokens
        self.language, self.model = language, model
        self.bench = Bench(model, calibration, positions=int(model.config.max_position_embeddings))

    @torch.inference_mode()
    def recalled(self, haystack: Haystack, scheme: Scheme) -> Iterator[tuple[int, bool]]:
        """For every needle asked for, its depth and whether it is recalled through the cache of a scheme."""
        HOOK.view, HOOK.policy = scheme.viewer(self.bench.statistics), scheme.policy
        tokens = torch.tensor(haystack.tokens, device=self.model.device)
        hidden = self.model.model(tokens[None], use_cache=False).last_hidden_state[0]
        places = torch.tensor([question.place for question in haystack.questions], device=tokens.device)
        likely = self.model.lm_head(hidden[places - 1]).topk(VALUES_OF_KEY).indices.tolist()
        for question, said in zip(haystack.questions, likely, strict=True):
            for value, depth in question.values:
                yield depth, value in said[: len(question.values)]

    def records(self, scheme: Scheme, lengths: dict[int, int]) -> Iterator[dict[str, Any]]:
        """One record for every length, variant and depth."""
        for tokens, count in lengths.items():
            for variant in VARIANTS:
                right: Counter[int] = Counter()
                asked: Counter[int] = Counter()
                for seed in range(count):
                    for depth, is_right in self.recalled(make_haystack(self.language, variant, tokens, seed), scheme):
                        asked[depth] += 1
                        right[depth] += is_right
                for depth in DEPTHS:
                    yield {
                        "format": NAMES.get(scheme.name, scheme.name), "variant": variant, "length": tokens,
                        "depth": depth, "recall": round(right[depth] / asked[depth], 4), "trials": asked[depth],
                    }  # fmt: skip


def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Recall of each format over the cells that fp16 passes, by variant, and the same at the longest length."""
    cell = ("variant", "length", "depth")
    fp16 = {tuple(r[key] for key in cell): r["recall"] for r in records if r["format"] == "fp16"}
    rows = []
    for name in dict.fromkeys(record["format"] for record in records):
        row: dict[str, Any] = {"format": name}
        for variant in VARIANTS:
            scored = [
                r for r in records
                if r["format"] == name and r["variant"] == variant and fp16[tuple(r[k] for k in cell)] >= SCORED_FROM
            ]  # fmt: skip
            row[variant] = _recall(scored)
            row[f"{variant} at the longest"] = _recall([r for r in scored if r["length"] == max(LENGTHS)])
        rows.append(row)
    return rows


def _recall(records: list[dict[str, Any]]) -> float | None:
    trials = sum(record["trials"] for record in records)
    return round(sum(record["recall"] * record["trials"] for record in records) / trials, 4) if trials else None


def schemes() -> list[Scheme]:
    """What is measured, the most wanted first."""
    known = {scheme.name: scheme for scheme in [*OURS, *PEERS, *STATIC]}
    rest = [scheme.name for scheme in [*OURS, *PEERS] if scheme.name not in FIRST]
    return [known[name] for name in [*FIRST, *rest]]


def main() -> None:
    """Measure and store; the last line of stdout is the summary as JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.needle", description="Recall by format, length and depth.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, default=Path("bench/results/needle.json"))
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further format after this")
    parser.add_argument("--longest", type=int, default=max(LENGTHS), help="leave longer haystacks out")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    recipe = json.loads((options.model / "training.json").read_text(encoding="utf-8"))["recipe"]
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval().requires_grad_(False)
    needles = Needles(model.to(device), Language(**recipe["language"]))
    lengths = {tokens: count for tokens, count in LENGTHS.items() if tokens <= options.longest}
    records: list[dict[str, Any]] = []
    start = time.monotonic()
    for scheme in schemes():
        if time.monotonic() - start > options.seconds:
            break
        records += needles.records(scheme, lengths)
        print(f"{time.monotonic() - start:.0f} s {json.dumps(summarise(records)[-1])}", flush=True)
        options.out.write_text(_as_lines(records), encoding="utf-8")
    print(json.dumps(summarise(records)))


def _as_lines(records: list[dict[str, Any]]) -> str:
    """A JSON list with a record a line."""
    return "[\n" + ",\n".join(json.dumps(record) for record in records) + "\n]\n"


if __name__ == "__main__":
    main()
