"""The needle model's language: every question has a right answer, and recall counts what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from bench.needle import Needles, formats, others_in, summarise
from bench.needle_batches import Batch, drill_batch, random_batch
from bench.needle_guide import GUIDED, Guide
from bench.needle_train import FULL, WIRED, Stage, losses, make_model, train
from eval.needle_words import ASK, DEPTHS, ITEM_TOKENS, NEEDLE, VALUES_OF_KEY, VARIANTS, Language, make_haystack
from nibble.formats import FORMATS

LANGUAGE = Language(keys=1024, values=32, fillers=64)
RECIPE = replace(WIRED, language=LANGUAGE, stages=())


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


@pytest.mark.parametrize(("tokens", "needles", "filler"), [(96, 16, 0), (3072, 100, 824), (768, 200, 0)])
def test_a_lesson_tells_its_needles_before_it_asks(tokens: int, needles: int, filler: int) -> None:
    batch = drill_batch(LANGUAGE, 6, tokens, needles, "cpu", torch.Generator().manual_seed(0))
    assert batch.tokens.shape == batch.is_answer.shape == (6, tokens)
    most = set()
    for row, marks in zip(batch.tokens.tolist(), batch.is_answer.tolist(), strict=True):
        told: dict[int, list[int]] = {}
        items = [row[at : at + ITEM_TOKENS] for at in range(0, tokens, ITEM_TOKENS)]
        assert sum(item[0] >= LANGUAGE.first_filler for item in items) == filler
        for at, (kind, key, value) in enumerate(items):
            if kind == NEEDLE:
                told.setdefault(key, []).append(value)
            if kind == ASK:
                assert value in told[key]
                assert marks[3 * at + 2] == ([ASK, key] not in [item[:2] for item in items[:at]])
        assert sum(map(len, told.values())) == needles
        most.add(max(map(len, told.values())))
    assert most == {1, VALUES_OF_KEY}


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


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model(RECIPE).eval().requires_grad_(False)


def test_the_wired_model_recalls_every_needle_through_every_cache(model: PreTrainedModel) -> None:
    needles = Needles(model, LANGUAGE)
    haystack = make_haystack(LANGUAGE, "multikey", 1024, seed=0)
    found = formats(needles)
    for name in ("fp16", "int8", "int4", "int4-static"):
        recalled = [right for _, right in needles.recalled(haystack, found[name])]
        assert len(recalled) == 44
        assert all(recalled), name


def test_the_last_layer_answers_the_questions_as_a_whole_pass_does(model: PreTrainedModel) -> None:
    needles = Needles(model, LANGUAGE)
    haystack, spec = make_haystack(LANGUAGE, "single", 1024, seed=0), formats(needles)["int4"]
    tokens, asked = torch.tensor(haystack.tokens), haystack.questions[0].place - 1
    whole, part = (needles._run(tokens, spec, **options) for options in ({}, {"asked_from": asked}))
    assert torch.equal(whole[asked:], part[asked:])


def test_a_model_without_its_neighbour_head_recalls_nothing() -> None:
    model = make_model(RECIPE).eval().requires_grad_(False)
    model.model.layers[0].self_attn.o_proj.weight.zero_()
    needles = Needles(model, LANGUAGE)
    recalled = needles.recalled(make_haystack(LANGUAGE, "multikey", 1024, seed=0), needles.spec(FORMATS["fp16"]))
    assert sum(right for _, right in recalled) < 22


def test_the_loss_is_on_answers_alone() -> None:
    model = make_model(RECIPE)
    batch = random_batch(LANGUAGE, 2, 96, "cpu", torch.Generator().manual_seed(0))
    marks = batch.is_answer.clone()
    marks[:, -1] = False
    changed = batch.tokens.clone()
    changed[:, -1] = 5
    first, second = (losses(model, Batch(tokens, marks))[0] for tokens in (batch.tokens, changed))
    assert torch.equal(first, second)


def test_the_guide_wants_the_token_before_and_the_values_of_the_key_that_is_asked_for() -> None:
    told = {}
    for name, recipe in {"wired": RECIPE, "random": replace(RECIPE, wired=False)}.items():
        model = make_model(recipe)
        model.set_attn_implementation(GUIDED)
        batch = random_batch(LANGUAGE, 4, 512, "cpu", torch.Generator().manual_seed(1))
        guide = Guide(batch, neighbour=1.0, match=1.0)
        losses(model, batch, guide)
        told[name] = [guide.losses[layer].item() for layer in (0, 1)]
    assert all(loss < 0.05 for loss in told["wired"])
    assert all(loss > 1.0 for loss in told["random"])


def test_training_follows_its_recipe() -> None:
    lessons = (Stage(48, 4, 4, 1e-3, needles=(4, 8)), Stage(96, 2, 2, 1e-3))
    recipe = replace(FULL, language=LANGUAGE, hidden=64, heads=1, kv_heads=1, head_dim=64, stages=lessons)
    trained, log = train(recipe, "cpu")
    assert [(entry["tokens"], entry["steps"]) for entry in log] == [(48, 4), (96, 2)]
    assert all(entry["guide"] > 0 for entry in log)
    assert not torch.equal(trained.lm_head.weight, make_model(recipe).lm_head.weight)


def test_measuring_a_model_again_replaces_its_own_records_alone(tmp_path: Path) -> None:
    stored = [{"model": "a", "recall": 1.0}, {"model": "b", "recall": 0.5}]
    (tmp_path / "needle.json").write_text(json.dumps(stored), encoding="utf-8")
    assert others_in(tmp_path / "needle.json", "a") == stored[1:]
    assert others_in(tmp_path / "none.json", "a") == []


def test_only_cells_that_fp16_passes_are_scored() -> None:
    def record(name: str, depth: int, recall: float) -> dict[str, object]:
        return {"format": name, "variant": "single", "length": 32768, "depth": depth, "recall": recall, "trials": 10}

    rows = summarise([record("fp16", 0, 1.0), record("fp16", 50, 0.2), record("int4", 0, 0.9), record("int4", 50, 0.0)])
    assert [row["single"] for row in rows] == [1.0, 0.9]
