"""The whole evaluation on a tiny model: real engines, real caches, the stored report and the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

import eval.evaluate
from eval.config import EvalPlan, SpeedPlan, load_plan
from eval.evaluate import EvalRequest, evaluate
from eval.memory import measure_footprint
from eval.records import Report, ServedCheck
from eval.run import failed_checks, main
from eval.served import GreedyAnswer, compare_hosts, in_process_host
from eval.speed import measure_speed, random_prompt, random_prompts, stream_counts, time_streams
from eval.subjects import Subjects, check_request, require_engine
from nibble.errors import NibbleError
from nibble.formats import PAGE_TOKENS, KVFormat
from nibble.models import load_model, load_tokenizer
from nibble.recipes import CertificateRecipe, recipe_names
from nibble.runtime import Engine, EngineLimits, SamplingParams
from nibble.runtime.cache import CacheSpec
from nibble.runtime.engine import EngineOrigin
from nibble.visibility import PagePolicy

PLAN = EvalPlan(
    name="test",
    windows=3,
    window_tokens=256,
    seed=0,
    speed=SpeedPlan(prompt_tokens=16, decode_tokens=6, streams=2, repeats=1),
    memory_tokens=320,
)
SUMMARY_FIELDS = [
    "model", "kv", "tokens", "kl_mean", "kl_p999", "ppl", "ppl_fp16", "ppl_delta_pct", "top1_agreement",
    "bytes_per_token", "bytes_per_token_fp16", "decode_tokens_per_s", "decode_tokens_per_s_fp16",
]  # fmt: skip


@dataclass(frozen=True)
class FakeManifest:
    engine_hash: str

    @property
    def kv(self) -> SimpleNamespace:
        return SimpleNamespace(recipe=SimpleNamespace(certificate=CertificateRecipe()))


def tiny_engine(folder: Path, kv: str) -> Engine:
    model, tokenizer = load_model(folder, "float32"), load_tokenizer(folder)
    spec = CacheSpec((KVFormat.named(kv),) * 2, num_kv_heads=2, head_dim=32, policy=PagePolicy())
    limits = EngineLimits(max_context=512, max_running=2, chunk_tokens=PAGE_TOKENS)
    origin = EngineOrigin(kv, FakeManifest(f"hash of {kv}"))  # type: ignore[arg-type]
    return Engine(model, tokenizer, spec, limits, origin=origin)


@pytest.fixture(scope="module")
def subjects(tiny_llama_dir: Path) -> Subjects:
    return Subjects(tiny_engine(tiny_llama_dir, "int4"), tiny_engine(tiny_llama_dir, "fp16"), tiny_llama_dir)


@pytest.fixture
def in_place(subjects: Subjects, tmp_path: Path) -> Iterator[Path]:
    """The tiny engines stand for the built ones of smollm2-135m; the folder of their results is given."""
    with standing_in(subjects, tmp_path):
        yield tmp_path / "smollm2-135m" / "int4"
    subjects.quantized.check_integrity()
    subjects.fp16.check_integrity()


@pytest.fixture(scope="module")
def finished(subjects: Subjects, tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    """One finished evaluation: its report and its folder."""
    with standing_in(subjects, tmp_path_factory.mktemp("results")):
        return evaluate(request(), Console(quiet=True))


@contextmanager
def standing_in(subjects: Subjects, results: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NIBBLE_RESULTS", str(results))
        patch.setattr(eval.evaluate, "require_engine", lambda model, kv: results)
        patch.setattr(eval.evaluate, "require_baseline", lambda model, console: results)
        patch.setattr(eval.evaluate, "load_subjects", lambda quantized, fp16, plan: subjects)
        yield


def request(**changes: object) -> EvalRequest:
    return EvalRequest(**{"model": "smollm2-135m", "kv": "int4", "plan": PLAN, "served": False, **changes})  # type: ignore[arg-type]


def test_the_report_is_stored_and_reads_back(finished: tuple[Report, Path]) -> None:
    report, folder = finished
    assert folder.parts[-3:-1] == ("smollm2-135m", "int4")
    assert (folder.parent / "latest").resolve() == folder
    assert Report.model_validate_json((folder / "report.json").read_text(), strict=False) == report
    assert len((folder / "positions.jsonl").read_text().splitlines()) == PLAN.windows
    assert report.summary.tokens == PLAN.windows * PLAN.window_tokens
    assert report.quality.kl.mean > 0
    assert all(bucket.kl_mean and bucket.kl_mean.interval for bucket in report.quality.buckets)
    assert [(point.streams, point.tokens > 0) for point in report.speed.fp16.latencies] == [(1, True), (2, True)]
    assert report.served.outcome == "skipped"
    assert report.engines["quantized"].engine_hash == "hash of int4"


def test_the_summary_is_flat_and_has_exactly_these_fields(finished: tuple[Report, Path]) -> None:
    _, folder = finished
    summary = json.loads((folder / "report.json").read_text())["summary"]
    assert list(summary) == SUMMARY_FIELDS
    assert all(isinstance(value, str | int | float) for value in summary.values())


def test_quantized_pages_are_read_only_behind_the_recent_ones(finished: tuple[Report, Path]) -> None:
    """Through the cache: no KL while every visible page is fp16, some as soon as one is sealed."""
    _, folder = finished
    lines = [json.loads(line)["kl"] for line in (folder / "positions.jsonl").read_text().splitlines()]
    first_sealed = 3 * PAGE_TOKENS  # page 3 sees page 1 quantized: page 0 is a sink, page 2 recent
    assert max(max(kl[:first_sealed]) for kl in lines) < 1e-4
    assert min(max(kl[first_sealed:]) for kl in lines) > 1e-3


def test_an_interrupted_run_goes_on_and_gives_the_same_figures(
    in_place: Path, finished: tuple[Report, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = finished
    compared: list[int] = []
    compare = eval.evaluate.compare_window

    def compare_until_second(*arguments: object) -> object:
        if len(compared) == 2:
            raise KeyboardInterrupt
        compared.append(arguments[3])  # type: ignore[arg-type]
        return compare(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(eval.evaluate, "compare_window", compare_until_second)
    with pytest.raises(KeyboardInterrupt):
        evaluate(request(), Console(quiet=True))
    assert compared == [0, 1]
    compared.clear()
    resumed, _ = evaluate(request(), Console(quiet=True))
    assert compared == [2]
    assert resumed.quality == whole.quality


def test_the_html_needs_nothing_else_and_has_all_plots(finished: tuple[Report, Path]) -> None:
    _, folder = finished
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == 6
    assert "var(--quantized)" in page
    assert not re.search(r"""(src|href)=["'](?!#|data:)""", page)
    assert "<script" not in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    used = set(re.findall(r"url\(#([^)]+)\)", page)) | set(re.findall(r'href="#([^"]+)"', page))
    assert used <= set(ids)
    assert all(ids.count(name) == 1 for name in used)


def test_the_command_line_ends_with_the_summary_also_when_a_check_failed(
    in_place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.run.load_plan", lambda name, **overrides: PLAN)
    with pytest.raises(SystemExit, match="1"):
        main(["--model", "smollm2-135m", "--kv", "int4", "--no-served", "--max-kl-mean", "1e-12"])
    out = capsys.readouterr().out
    assert list(json.loads(out.splitlines()[-1])) == SUMMARY_FIELDS
    assert "same top token" in out
    assert "failed: mean KL" in out


@pytest.mark.parametrize(("outcome", "fails"), [("same", 0), ("skipped", 0), ("different", 1), ("failed", 1)])
def test_which_served_outcomes_fail(finished: tuple[Report, Path], outcome: str, fails: int) -> None:
    report, _ = finished
    check = ServedCheck(outcome=outcome, detail="", prompts=0)  # type: ignore[arg-type]
    assert len(failed_checks(report.model_copy(update={"served": check}), None)) == fails


def test_a_broken_engine_stops_the_run(in_place: Path, subjects: Subjects, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = subjects.quantized.runner.backend.storage  # type: ignore[attr-defined]
    seal = type(subjects.quantized.runner.backend).seal

    def seal_and_spoil(backend: object, layer: int, step: object) -> None:
        seal(backend, layer, step)  # type: ignore[arg-type]
        if backend is subjects.quantized.runner.backend:
            storage.sealed[layer].fill_(0xFF)  # every scale is NaN

    monkeypatch.setattr(type(subjects.quantized.runner.backend), "seal", seal_and_spoil)
    window_only = PLAN.model_copy(update={"memory_tokens": 64})
    with pytest.raises(NibbleError, match=r"quantized engine.*window 0, position 192"):
        evaluate(request(plan=window_only), Console(quiet=True))


def test_the_footprint_counts_both_kinds_of_page(subjects: Subjects) -> None:
    prompt = random_prompt(256, 320, seed=7)
    quantized, fp16 = measure_footprint(subjects.quantized, prompt), measure_footprint(subjects.fp16, prompt)
    assert quantized.sealed_bytes == 2 * PAGE_TOKENS * quantized.sealed_bytes_per_token
    assert quantized.open_bytes == fp16.open_bytes == 3 * PAGE_TOKENS * fp16.sealed_bytes_per_token
    assert quantized.bytes_per_token < fp16.bytes_per_token
    assert quantized.bytes_per_token > quantized.sealed_bytes_per_token


def test_streams_are_timed_while_all_of_them_run(subjects: Subjects) -> None:
    prompts = random_prompts(256, 16, seed=0)
    times = time_streams(subjects.quantized, [next(prompts), next(prompts)], decode_tokens=5)
    assert [len(arrivals) for arrivals in times.arrivals.values()] == [5, 5]
    assert times.prefill_tokens_per_s > 0
    assert times.decode_tokens_per_s > 0
    assert 0 < len(times.waits) <= 8
    assert stream_counts(6) == [1, 2, 4, 6]
    assert stream_counts(1) == [1]


def test_streams_whose_prompts_take_longer_than_their_answers_are_timed_together(subjects: Subjects) -> None:
    plan = SpeedPlan(prompt_tokens=256, decode_tokens=2, streams=2, repeats=1)
    assert plan.tokens_written(2, subjects.fp16.limits.step_tokens) > 2 + 1
    speed = measure_speed(subjects.quantized, subjects.fp16, plan, seed=0)
    assert [(each.streams, each.tokens > 0) for each in speed.fp16.latencies] == [(1, True), (2, True)]


def test_hosts_that_agree_and_hosts_that_do_not(subjects: Subjects) -> None:
    engine = in_process_host(subjects.quantized)
    assert compare_hosts(engine, engine, ["one", "two"]).outcome == "same"

    def off_by_one(prompt: str) -> GreedyAnswer:
        tokens = engine(prompt).token_ids
        return GreedyAnswer([*tokens[:5], tokens[5] + 1, *tokens[6:]], "int4")

    different = compare_hosts(engine, off_by_one, ["one", "two"])
    assert (different.outcome, different.prompts) == ("different", 1)
    assert "prompt 0, token 5" in different.detail
    other_cache = compare_hosts(engine, lambda prompt: GreedyAnswer(engine(prompt).token_ids, "fp16"), ["one"])
    assert "the server through fp16" in other_cache.detail


def test_logits_through_the_cache_predict_what_greedy_generation_picks(subjects: Subjects) -> None:
    engine, prompt = subjects.quantized, random_prompt(256, 200, seed=3)
    (completion,) = engine.generate([prompt], SamplingParams(max_tokens=20, ignore_eos=True))
    logits = torch.cat(list(engine.logits([*prompt, *completion.token_ids])))
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == completion.token_ids


@pytest.mark.parametrize("name", recipe_names("eval"))
def test_every_shipped_plan_loads(name: str) -> None:
    assert load_plan(name).name == name


def test_an_unknown_plan_lists_the_plans() -> None:
    with pytest.raises(NibbleError, match="allowed full, long, quick"):
        load_plan("fast")


@pytest.mark.parametrize(("key", "value"), [("windows", 0), ("window_tokens", 3), ("seed", -1)])
def test_a_bad_override_is_an_error(key: str, value: int) -> None:
    with pytest.raises(NibbleError, match=rf"command line: key {key}: got {value}"):
        load_plan("quick", **{key: value})


@pytest.mark.parametrize(
    ("model", "kv", "plan", "message"),
    [
        ("no-such-model", "int4", PLAN, "no-such-model"),
        ("smollm2-135m", "int3", PLAN, "got 'int3', allowed"),
        ("smollm2-135m", "int4", PLAN.model_copy(update={"window_tokens": 9000}), "9000 tokens, allowed at most 8192"),
    ],
)
def test_a_bad_request_is_an_error(model: str, kv: str, plan: EvalPlan, message: str) -> None:
    with pytest.raises(NibbleError, match=message):
        check_request(model, kv, plan)


def test_a_missing_engine_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIBBLE_ENGINES", str(tmp_path))
    with pytest.raises(NibbleError, match="run: make engine MODEL=smollm2-135m KV=int4"):
        require_engine("smollm2-135m", "int4")
