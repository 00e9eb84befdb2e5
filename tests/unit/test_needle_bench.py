"""The needle model's language: every question has a right answer, and recall counts what it says."""

from __future__ import annotations

import pytest
import torch

from bench.needle import DEPTHS, VARIANTS, Haystack, Needles, Question, make_haystack, schemes, summarise
from bench.needle_language import ASK, ITEM_TOKENS, NEEDLE, VALUES_OF_KEY, Language, random_batch
from bench.needle_train import SMALL, answer_loss, make_model

LANGUAGE = Language(keys=1024, values=32, fillers=64)


def test_training_text_answers_each_question_with_a_needle_told_before() -> None:
    batch = random_batch(LANGUAGE, 8, 512, "cpu", torch.Generator().manual_seed(0))
    assert batch.tokens.shape == batch.is_answer.shape == (8, 512)
    assert int(batch.tokens.max()) < LANGUAGE.size
    asked, most = 0, 0
    for row, marks in zip(batch.tokens.tolist(), batch.is_answer.tolist(), strict=True):
        told: dict[int, list[int]] = {}
        for at in range(len(row) - ITEM_TOKENS + 1):
            if row[at] == NEEDLE:
                told.setdefault(row[at + 1], []).append(row[at + 2])
            if row[at] == ASK:
                assert row[at + 2] in told[row[at + 1]]
                assert marks[at + 2]
                asked += 1
        most = max(most, *(len(values) for values in told.values()))
    assert asked > 100
    assert most == VALUES_OF_KEY


@pytest.mark.parametrize("variant", VARIANTS)
def test_haystacks_ask_at_every_depth(variant: str) -> None:
    haystack = make_haystack(LANGUAGE, variant, 4096, seed=1)
    assert len(haystack.tokens) == 4096
    end = haystack.questions[0].place - 2
    told = {at: haystack.tokens[at + 1 : at + 3] for at in range(end) if haystack.tokens[at] == NEEDLE}
    assert {depth for question in haystack.questions for _, depth in question.values} == set(DEPTHS)
    for question in haystack.questions:
        key = haystack.tokens[question.place - 1]
        places = [at for at, (owner, _) in told.items() if owner == key]
        assert len(places) == len(question.values) == (VALUES_OF_KEY if variant == "multivalue" else 1)
        for at, (value, depth) in zip(places, sorted(question.values, key=lambda pair: pair[1]), strict=True):
            assert told[at][1] == value or variant == "multivalue"
            assert abs(at / end - depth / 100) < 0.1
    assert (len(told) > 200) == (variant == "multikey")
    assert haystack == make_haystack(LANGUAGE, variant, 4096, seed=1)


def test_recall_through_a_cache_is_what_the_model_says() -> None:
    model = make_model(SMALL).eval().requires_grad_(False)
    needles = Needles(model, SMALL.language)
    model.lm_head.weight.zero_()
    model.lm_head.weight[5] = 1.0  # token 5 is first or last everywhere
    said = [
        any(right for _, right in needles.recalled(Haystack([0] * 64, [Question(40, ((token, 0),))]), schemes()[0]))
        for token in (5, 6)
    ]
    assert said[0] or not said[1]


def test_the_loss_is_on_answers_alone() -> None:
    model = make_model(SMALL)
    batch = random_batch(SMALL.language, 2, 96, "cpu", torch.Generator().manual_seed(0))
    marks = batch.is_answer.clone()
    marks[:, -1] = False
    changed = batch.tokens.clone()
    changed[:, -1] = 5
    first, second = (answer_loss(model, tokens, marks)[0] for tokens in (batch.tokens, changed))
    assert torch.equal(first, second)


def test_only_cells_that_fp16_passes_are_scored() -> None:
    def record(name: str, depth: int, recall: float) -> dict[str, object]:
        return {"format": name, "variant": "single", "length": 32768, "depth": depth, "recall": recall, "trials": 10}

    rows = summarise([record("fp16", 0, 1.0), record("fp16", 50, 0.2), record("int4", 0, 0.9), record("int4", 50, 0.0)])
    assert [row["single"] for row in rows] == [1.0, 0.9]
