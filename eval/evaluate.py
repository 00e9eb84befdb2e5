"""The evaluation from start to end: engines, windows, memory, quality, speed, the served check, one stored report."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from eval.behaviour import Hosts, compare_behaviour
from eval.compare import compare_window
from eval.config import EvalPlan
from eval.environment import code_sha256, describe_environment
from eval.hosts import NativeHost
from eval.layers import can_be_replayed, measure_layers
from eval.measures import PositionMeasures
from eval.memory import measure_memory
from eval.needle_words import Language
from eval.partial import PartialRun, open_partial, partial_key
from eval.progress import show_progress
from eval.records import (
    SCHEMA_VERSION,
    LayerCheck,
    Memory,
    NeedleFigures,
    Quality,
    Report,
    ServedCheck,
    Speed,
    Summary,
    TaskFigures,
)
from eval.report import render_html
from eval.results import partial_dir, results_dir, results_root, store_run
from eval.runs import latest_reports
from eval.served import check_served, skipped_check
from eval.speed import measure_speed, random_prompt
from eval.statistics import summarise
from eval.subjects import BASELINE_KV, Subjects, check_request, load_subjects, require_baseline, require_engine
from eval.windows import WindowSet, choose_windows, count_words
from nibble.recipes import load_kv_recipe, load_model_recipe
from nibble.runtime import Engine, EngineLimits


@dataclass(frozen=True)
class EvalRequest:
    """What to evaluate. model, kv: as the user names them. served: also ask a served endpoint for its greedy tokens."""

    model: str
    kv: str
    plan: EvalPlan
    served: bool = True

    @property
    def names(self) -> tuple[str, str]:
        """The names of the model's and the KV recipe, which folders carry."""
        return load_model_recipe(self.model).name, load_kv_recipe(self.kv).name


@dataclass(frozen=True)
class Measured:
    """Everything that was measured, before it is written down. positions: those of each window of `text`."""

    text: WindowSet
    positions: list[PositionMeasures]
    memory: Memory
    speed: Speed
    served: ServedCheck
    layers: LayerCheck | None
    tasks: list[TaskFigures]
    needle: NeedleFigures | None


def evaluate(request: EvalRequest, console: Console) -> tuple[Report, Path]:
    """Measure everything and store the run; returns the report and its folder. NibbleError for bad input."""
    started, created = time.monotonic(), datetime.now(UTC)
    check_request(request.model, request.kv, request.plan)
    subjects = _prepare(request, console)
    request = replace(request, plan=_readable(request.plan, subjects, console))
    text = _choose_text(subjects, request.plan)
    with open_partial(partial_dir(*request.names), _key(subjects, text)) as partial:
        if len(partial):
            console.print(
                f"going on with an interrupted run: {len(partial)} of {len(text.windows)} windows are measured"
            )
        measured = _measure(request, subjects, text, partial, console)
        report = _report(request, subjects, measured, created, time.monotonic() - started)
        files: dict[str, str | Path] = {
            "report.json": report.model_dump_json(indent=2) + "\n",
            "report.html": _page(request, subjects, measured, report),
            "positions.jsonl": partial.path,
            "answers.jsonl": partial.answers.path,
        }
        return report, store_run(results_dir(*request.names), created, files)


def _page(request: EvalRequest, subjects: Subjects, measured: Measured, report: Report) -> str:
    manifest = subjects.quantized.manifest
    assert manifest is not None  # every loaded engine has one
    others = latest_reports(results_root(), request.names[0])
    return render_html(report, measured.positions, others, manifest.kv.recipe.certificate)


def _prepare(request: EvalRequest, console: Console) -> Subjects:
    quantized = require_engine(request.model, request.kv)
    fp16 = require_baseline(request.model, console)
    console.print(f"loading {request.model} twice: KV {request.kv} and fp16")
    return load_subjects(quantized, fp16, request.plan)


def _readable(plan: EvalPlan, subjects: Subjects, console: Console) -> EvalPlan:
    """The plan without what the model can't read."""
    if plan.tasks is None or Language.of(subjects.fp16.tokenizer) is None:
        return plan
    console.print("tasks are left out: they are in English, and this model reads the needle language alone")
    return plan.model_copy(update={"tasks": None})


def _choose_text(subjects: Subjects, plan: EvalPlan) -> WindowSet:
    tokenizer = subjects.quantized.tokenizer
    return choose_windows(tokenizer, count=plan.windows, window_tokens=plan.window_tokens, seed=plan.seed)


def _key(subjects: Subjects, text: WindowSet) -> str:
    """Names everything that decides the numbers of a window."""
    engines = [record.engine_hash for record in subjects.records.values()]
    return partial_key(str(SCHEMA_VERSION), *engines, text.sha256, code_sha256())


def _measure(
    request: EvalRequest, subjects: Subjects, text: WindowSet, partial: PartialRun, console: Console
) -> Measured:
    plan, quantized, fp16 = request.plan, subjects.quantized, subjects.fp16
    memory = measure_memory(quantized, fp16, random_prompt(len(quantized.tokenizer), plan.memory_tokens, plan.seed))
    positions = compare_windows(subjects, text, partial)
    layers = check_layers(subjects, text, plan.layer_tokens, console)
    if plan.tasks or plan.needle:
        console.print(_what_is_asked(plan))
    hosts: Hosts = {"quantized": NativeHost(quantized), "fp16": NativeHost(fp16)}
    tasks, needle = compare_behaviour(hosts, fp16.tokenizer, plan, partial.answers)
    console.print("timing both engines in turn")
    speed = measure_speed(quantized, fp16, plan.speed, plan.seed)
    served = skipped_check("not asked for (--no-served)")
    if request.served:
        console.print("asking the served endpoint for the same greedy tokens")
        served = check_served(quantized, subjects.quantized_dir, text.windows, console)
    return Measured(text, positions, memory, speed, served, layers, tasks, needle)


def _what_is_asked(plan: EvalPlan) -> str:
    parts = []
    if plan.tasks:
        parts.append(f"tasks ({', '.join(plan.tasks.names)}; {plan.tasks.documents} documents each)")
    if plan.needle:
        parts.append(f"needles ({plan.needle.lengths} tokens, depths {plan.needle.depths} %)")
    return f"asking both engines: {', '.join(parts)}"


def check_layers(subjects: Subjects, text: WindowSet, tokens: int, console: Console) -> LayerCheck | None:
    """Replay the beginning of the first window layer by layer; None for no tokens."""
    if not tokens:
        return None
    console.print("replaying a text through every layer of both engines")
    fp16, quantized = subjects.fp16, subjects.quantized
    if not (can_be_replayed(fp16) and can_be_replayed(quantized)):
        console.print("on the CPU: a GPU's runner does not show its layers; its kernels are judged by the whole model")
        limits = EngineLimits(max_context=tokens, max_running=1, device="cpu")
        twins = (subjects.quantized_dir.parent / BASELINE_KV, subjects.quantized_dir)
        fp16, quantized = (Engine.load(folder, limits) for folder in twins)
    token_ids = text.windows[0].inputs[:tokens]
    digest = hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()
    layers = measure_layers(fp16, quantized, token_ids)
    return LayerCheck(tokens=len(token_ids), sha256=digest, layers=layers)


def compare_windows(subjects: Subjects, text: WindowSet, partial: PartialRun) -> list[PositionMeasures]:
    """Measure every window that `partial` does not have yet; returns all of them, in order."""
    finished = [partial.measured(window) for window in text.windows]
    done = sum(len(measures) for measures in finished if measures is not None)
    with show_progress(text.positions, done, "comparing", "positions") as advance:
        for index, window in enumerate(text.windows):
            if finished[index] is None:
                measures = compare_window(subjects.fp16, subjects.quantized, window, index, advance)
                finished[index] = partial.add(window, measures)
    return [measures for measures in finished if measures is not None]


def _report(request: EvalRequest, subjects: Subjects, measured: Measured, created: datetime, seconds: float) -> Report:
    words = count_words(subjects.fp16.tokenizer, measured.text.windows)
    quality = summarise(measured.text.windows, measured.positions, seed=request.plan.seed, words=words)
    return Report(
        created=created.isoformat(timespec="seconds"),
        seconds=seconds,
        summary=_summary(request, quality, measured),
        plan=request.plan,
        engines=subjects.records,
        inputs=measured.text.record,
        quality=quality,
        memory=measured.memory,
        speed=measured.speed,
        served=measured.served,
        environment=describe_environment(),
        layers=measured.layers,
        tasks=measured.tasks,
        needle=measured.needle,
    )


def _summary(request: EvalRequest, quality: Quality, measured: Measured) -> Summary:
    model, kv = request.names
    memory, speed = measured.memory, measured.speed
    return Summary(
        model=model,
        kv=kv,
        tokens=quality.positions,
        kl_mean=quality.kl.mean,
        kl_p999=quality.kl.p999,
        ppl=quality.ppl,
        ppl_fp16=quality.ppl_fp16,
        ppl_delta_pct=quality.ppl_delta_pct.value,
        top1_agreement=quality.top1_agreement.value,
        bytes_per_token=memory.quantized.sealed_bytes_per_token,
        bytes_per_token_fp16=memory.fp16.sealed_bytes_per_token,
        decode_tokens_per_s=speed.quantized.decode_tokens_per_s,
        decode_tokens_per_s_fp16=speed.fp16.decode_tokens_per_s,
    )
