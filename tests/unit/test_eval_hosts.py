"""One interface, two hosts: they score and write the same, and the tasks above them judge what they say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eval.answers import SIDE_BY_SIDE, KeptAnswers, Questions
from eval.behaviour import compare_behaviour, needle_figures, task_figures
from eval.config import NeedlePlan, TaskPlan, load_plan
from eval.hosts import NativeHost, Prompt, Score, TritonHost
from eval.needle import VARIANTS, Trial, make_trials, recall
from eval.suite import TASK_FOLDER, Task, TaskAnswers, judge, load_task, questions_of, task_names
from eval.tasks.make import DOCUMENTS, MAKERS, make
from nibble.errors import NibbleError
from nibble.formats import FORMATS
from nibble.models import load_model, load_tokenizer
from nibble.runtime import Engine, EngineLimits, SamplingParams
from nibble.runtime.cache import CacheSpec
from nibble.visibility import PagePolicy


@pytest.fixture(scope="module")
def engine(tiny_llama_dir: Path) -> Engine:
    spec = CacheSpec((FORMATS["int4"],) * 2, num_kv_heads=2, head_dim=32, policy=PagePolicy())
    limits = EngineLimits(max_context=256, max_running=2, chunk_tokens=64)
    return Engine(load_model(tiny_llama_dir, "float32"), load_tokenizer(tiny_llama_dir), spec, limits)


class ServedEngine:
    """A server's client, answered by an engine in this process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def generate(self, prompt: str, *, max_tokens: int, temperature: float, **options: Any) -> SimpleNamespace:
        params = SamplingParams(
            max_tokens=max_tokens, stop=tuple(options.get("stop_words", ())), logprobs=options.get("top_log_probs", 0)
        )
        (done,) = self.engine.generate([self.engine.encode(prompt)], params)
        decode = self.engine.tokenizer.decode
        reports = [
            {"token": decode([token]), "logprob": logprob,
             "top": [{"token": decode([other]), "logprob": value} for other, value in top.items()]}
            for token, logprob, top in zip(done.token_ids, done.logprobs, done.top_logprobs, strict=True)
        ]  # fmt: skip
        return SimpleNamespace(text=done.text, token_log_probs=tuple(reports))


def test_a_continuation_is_scored_through_the_cache(engine: Engine) -> None:
    context, continuation = "word " * 45, "abc"  # behind sealed pages
    (score,) = NativeHost(engine).log_likelihood([(context.rstrip(), continuation)])
    ids = engine.encode(context.rstrip() + continuation)
    logits = torch.cat(list(engine.logits(ids[:-1])))[-3:].log_softmax(-1)
    wanted = sum(float(row[token]) for row, token in zip(logits, ids[-3:], strict=True))
    assert score.log_likelihood == pytest.approx(wanted, abs=1e-4)
    greedy = NativeHost(engine).generate_until([Prompt(context.rstrip(), (), 2)])[0]
    (own,) = NativeHost(engine).log_likelihood([(context.rstrip(), greedy)])
    assert own.is_greedy or "�" in greedy


def test_a_text_without_context_is_scored_from_its_first_token(engine: Engine) -> None:
    (score,), (rolling,) = (
        NativeHost(engine).log_likelihood([("", "a")]),
        NativeHost(engine).rolling_log_likelihood(["a"]),
    )
    assert score.log_likelihood == pytest.approx(rolling, abs=1e-5)


def test_a_text_is_scored_in_windows_of_the_context(engine: Engine) -> None:
    text = "some text " * 40
    whole = NativeHost(engine).rolling_log_likelihood([text])[0]
    ids = [257, *engine.encode(text)]
    by_hand = 0.0
    for start in range(0, len(ids) - 1, 255):
        part = ids[start : start + 256]
        logits = torch.cat(list(engine.logits(part[:-1]))).log_softmax(-1)
        by_hand += sum(float(row[token]) for row, token in zip(logits, part[1:], strict=True))
    assert whole == pytest.approx(by_hand, rel=1e-5)


def test_a_served_endpoint_scores_as_the_engine_does(engine: Engine) -> None:
    served = TritonHost("nowhere:1")
    served.client = ServedEngine(engine)  # type: ignore[assignment]
    prompts = [Prompt("Once", ("q",), 6)]
    assert served.generate_until(prompts) == NativeHost(engine).generate_until(prompts)
    top = served.client.generate("Once", max_tokens=1, temperature=0.0, top_log_probs=20).token_log_probs[0]["top"]
    known = next(each["token"] for each in top if each["token"].isascii() and each["token"].isprintable())
    (theirs,), (ours,) = (host.log_likelihood([("Once", known)]) for host in (served, NativeHost(engine)))
    assert theirs.log_likelihood == pytest.approx(ours.log_likelihood, abs=1e-3)
    unlikely = next(c for c in "abcdefghijklmnopqrstuvwxyz" if c not in {each["token"] for each in top})
    bound = served.log_likelihood([("Once", unlikely)])[0]
    assert not bound.is_greedy
    assert bound.log_likelihood >= NativeHost(engine).log_likelihood([("Once", unlikely)])[0].log_likelihood


class Scripted:
    """A host that knows every answer, but for the tasks it is told to get wrong."""

    def __init__(self, answers: dict[str, str], wrong: bool = False) -> None:
        self.answers, self.wrong = answers, wrong

    def log_likelihood(self, pairs: Sequence[tuple[str, str]]) -> list[Score]:
        return [Score(0.0 if (self.answers[text] == choice) != self.wrong else -1.0, False) for text, choice in pairs]

    def rolling_log_likelihood(self, texts: Sequence[str]) -> list[float]:
        return [0.0 for _ in texts]

    def generate_until(self, prompts: Sequence[Prompt]) -> list[str]:
        return [" ?" if self.wrong else f" {self.answers[prompt.text]}" for prompt in prompts]


def knowing(name: str, wrong: bool = False) -> Scripted:
    documents = load_task(name).documents
    return Scripted({d["text"]: d["choices"][d["label"]] if "choices" in d else d["target"] for d in documents}, wrong)


def answered(host: Scripted, task: Task) -> TaskAnswers:
    asked = questions_of(task)
    scores = [score.log_likelihood for score in host.log_likelihood(asked.pairs)]
    return judge(task, [*host.generate_until(asked.prompts), *scores])


@pytest.mark.parametrize("name", task_names())
def test_a_task_knows_right_from_wrong(name: str) -> None:
    task = load_task(name)
    assert len(task.documents) == DOCUMENTS
    assert all(answered(knowing(name), task).right)
    assert not any(answered(knowing(name, wrong=True), task).right)


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_the_stored_data_are_what_the_script_makes(name: str) -> None:
    assert (TASK_FOLDER / f"{name}.jsonl").read_text(encoding="utf-8") == make(name)


def test_an_unknown_task_lists_the_tasks() -> None:
    with pytest.raises(NibbleError, match="allowed arithmetic, copy, counting"):
        load_task("gsm8k")


def test_paired_figures_of_a_task() -> None:
    task = load_task("copy", 4)
    ours = TaskAnswers([True, False, True, False], ["abcd", "x", "", "ab"])
    theirs = TaskAnswers([True, True, True, False], ["abcd", "y", "", "abcd"])
    figures = task_figures(task, ours, theirs, seed=0)
    assert (figures.accuracy, figures.accuracy_fp16, figures.flips) == (0.5, 0.75, 1)
    assert figures.difference.value == -0.25
    assert figures.standard_error == pytest.approx(0.25)
    assert figures.same_text == pytest.approx((1 + 0 + 1 + 0.5) / 4)


def test_needles_lie_where_they_should_and_count_by_string_match(engine: Engine) -> None:
    trials = make_trials(engine.tokenizer, [2048], [0, 50, 100], seed=1)
    assert [trial.variant for trial in trials] == [variant for variant in VARIANTS for _ in range(3)]
    for trial in trials:
        assert abs(len(engine.encode(trial.prompt)) - trial.tokens) < 1024  # a token is a byte here
        assert all(trial.prompt.count(f" is: {number}.") == 1 for number in trial.answers)
        assert len(trial.answers) == (4 if trial.variant == "multivalue" else 1)
        assert trial.prompt.count("special magic numbers for") >= (4 if trial.variant != "single" else 1)
    assert recall(trials, [f"{trial.answers[0]} and more" for trial in trials]) == [1.0] * 6 + [0.25] * 3


def test_short_sets_are_asked_together(tmp_path: Path) -> None:
    batches = []

    class Counting(Scripted):
        def generate_until(self, prompts: Sequence[Prompt]) -> list[str]:
            batches.append(len(prompts))
            return [prompt.text.upper() for prompt in prompts]

    sizes = (3, SIDE_BY_SIDE - 3, 1, SIDE_BY_SIDE + 2, 2)
    sets = [
        Questions(f"set {number}", tuple(Prompt(f"p{number}.{at}", (), 1) for at in range(size)))
        for number, size in enumerate(sizes)
    ]
    answers = KeptAnswers(tmp_path / "key.answers.jsonl").ask_all("fp16", Counting({}), sets)
    assert batches == [SIDE_BY_SIDE, 1, SIDE_BY_SIDE + 2, 2]
    assert answers == [[prompt.text.upper() for prompt in asked.prompts] for asked in sets]


def test_what_an_interrupted_run_asked_is_not_asked_again(engine: Engine, tmp_path: Path) -> None:
    tasks = TaskPlan(names=["copy", "opposites"], documents=3)
    grid = NeedlePlan(lengths=[1024, 2048], depths=[0, 100])
    plan = load_plan("quick", tasks=tasks.model_dump(), needle=grid.model_dump())
    trials = make_trials(engine.tokenizer, grid.lengths, grid.depths, seed=0)
    right = {**knowing("copy").answers, **knowing("opposites").answers}
    right |= {trial.prompt: " ".join(trial.answers) for trial in trials}

    def compare(hosts: dict[str, Scripted]) -> tuple[object, ...]:
        kept = KeptAnswers(tmp_path / "key.answers.jsonl")
        return compare_behaviour(dict(hosts), engine.tokenizer, plan, kept)

    whole = compare({"quantized": Scripted(right), "fp16": Scripted(right)})
    lines = kept_lines = (tmp_path / "key.answers.jsonl").read_text().splitlines()
    assert len(lines) == (2 + 2 * 3) * 2  # tasks, lengths and variants; engines
    (tmp_path / "key.answers.jsonl").write_text("\n".join(lines[:-2]) + '\n{"asked": "fp16: needles')
    asked_again = {trial.prompt for trial in trials[-4:]}  # the two lines
    deaf = dict.fromkeys(right.keys() - asked_again, "")
    resumed = compare({"quantized": Scripted({**right, **deaf}), "fp16": Scripted({**right, **deaf})})
    assert resumed == whole
    assert (tmp_path / "key.answers.jsonl").read_text().splitlines() == kept_lines
    assert whole[1].recall == 1.0  # type: ignore[attr-defined]


def test_cells_that_fp16_fails_are_not_scored() -> None:
    trials = [Trial("single", 1024, depth, "", ("1",), 16) for depth in (0, 50, 100)]
    figures = needle_figures(trials, quantized=[1.0, 0.0, 0.0], fp16=[1.0, 1.0, 0.0], seed=0)
    assert (figures.scored, figures.recall, figures.recall_fp16) == (2, 0.5, 1.0)
    others = [replace(trial, prompt="another haystack") for trial in trials]
    assert figures.sha256 != needle_figures(others, [1.0] * 3, [1.0] * 3, seed=0).sha256
    assert figures.drop is not None and figures.drop.value == 0.5
    assert needle_figures(trials, [0.0] * 3, [0.0] * 3, seed=0).recall is None


def test_the_harness_agrees_with_the_suite() -> None:
    pytest.importorskip("lm_eval", reason='lm-evaluation-harness is not installed (EXTRAS="dev eval" make setup)')
    from eval.harness import run_harness

    half = knowing("copy")
    for document in load_task("copy").documents[2:]:
        half.answers[document["text"]] = "something else"
    both = Scripted({**half.answers, **knowing("opposites").answers})
    results = run_harness(both, ["nibble_copy", "nibble_opposites"], limit=4)
    assert results["nibble_copy"]["exact_match,answer"] == 0.5
    assert results["nibble_opposites"]["acc,none"] == 1.0
