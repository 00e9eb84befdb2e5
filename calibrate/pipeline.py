"""Calibration from end to end: resolve, draw prompts, collect ranges, check them, write the files.

The result depends on the model, the prompts, N, the seed and the versions alone (`identity`): the same identity gives
the same bytes, an existing result of that identity is kept, and an interrupted run of it is continued.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import save

from calibrate.checkpoint import Checkpoint, RangeKey, read_checkpoint, remove_checkpoint, write_checkpoint
from calibrate.prompt_set import Prompt, PromptSet, encode_prompts, load_prompt_set
from calibrate.ranges import ChannelRange, check_alive, range_tensors, silenced_by_norm
from calibrate.report import OUTLIER_RATIO, OUTLIER_ROWS, find_outliers, layer_statistics
from nibble import atomic
from nibble.calibration import REPORT_FILE, SCALES_FILE, SCHEMA, Calibration, read_calibration
from nibble.errors import NibbleError
from nibble.hashing import file_sha256, json_sha256
from nibble.models import device_options, hash_source, load_model, load_tokenizer, read_shape, resolve_source
from nibble.paths import REPOSITORY_ROOT
from nibble.recipes import ModelRecipe
from nibble.versions import versions

if TYPE_CHECKING:
    from calibrate.collector import RangeCollector

PROMPTS_PER_CHECKPOINT = 4


@dataclass(frozen=True)
class CalibrationRequest:
    """What to calibrate with what. max_tokens: of one prompt. out: the folder that gets the two files."""

    recipe: ModelRecipe
    prompts: str
    count: int
    seed: int
    max_tokens: int
    out: Path


@dataclass(frozen=True)
class _Plan:
    """A request with everything looked up."""

    request: CalibrationRequest
    source: Path
    prompt_set: PromptSet
    drawn: list[Prompt]
    inputs: dict[str, Any]

    @property
    def identity(self) -> str:
        return json_sha256(self.inputs)


def calibrate(request: CalibrationRequest, force: bool = False) -> Calibration:
    """Make (or find) the calibration that a request describes. Raises NibbleError."""
    console = Console(file=sys.stdout)  # bound now: modelopt's chatter is taken off stdout while it runs
    plan = _make_plan(request)
    with atomic.exclusive(request.out / REPORT_FILE, console.print):
        found = None if force else _find_finished(plan)
        if found is None:
            ranges, lengths = _collect(plan, console)
            _write(plan, ranges, lengths)
            remove_checkpoint(request.out)
            found = read_calibration(request.out)
            console.print(
                f"calibrated {request.recipe.name}: {sum(lengths)} tokens of {request.count} prompts, {request.out}"
            )
        else:
            console.print(f"calibration of {request.recipe.name} is up to date: {request.out}")
    return found


def _make_plan(request: CalibrationRequest) -> _Plan:
    prompt_set = load_prompt_set(request.prompts)
    drawn = prompt_set.draw(request.count, request.seed)
    source = resolve_source(request.recipe)
    inputs = {
        "schema": SCHEMA,
        "model": asdict(hash_source(source)),
        "dtype": request.recipe.dtype,
        "prompts_sha256": prompt_set.sha256,
        "count": request.count,
        "seed": request.seed,
        "max_tokens": request.max_tokens,
        "versions": versions(),
    }
    return _Plan(request, source, prompt_set, drawn, inputs)


def _find_finished(plan: _Plan) -> Calibration | None:
    """The calibration that is already there, when it is whole and of the same identity."""
    try:
        found = read_calibration(plan.request.out)
    except NibbleError:
        return None
    return found if found.report["identity"] == plan.identity else None


def _collect(plan: _Plan, console: Console) -> tuple[dict[RangeKey, ChannelRange], list[int]]:
    """Ranges of every layer's K and V, all channels alive, and the length of each prompt that made them."""
    token_ids = encode_prompts(plan.drawn, load_tokenizer(plan.source), plan.request.max_tokens)
    with console.status("loading nvidia-modelopt and the model"):
        from calibrate.collector import collect_ranges

        model = load_model(plan.source, plan.request.recipe.dtype, **device_options())
    collected: dict[RangeKey, ChannelRange] = {}

    def loop(collector: RangeCollector) -> None:
        _run_prompts(collector, token_ids, plan, console)
        collected.update(collector.ranges())

    collect_ranges(model, read_shape(plan.source).num_layers, loop)
    for (layer, tensor), channels in collected.items():
        attention = model.get_submodule(f"model.layers.{layer}.self_attn")
        check_alive(channels, f"layer {layer} {tensor.upper()}", silenced_by_norm(attention) if tensor == "k" else None)
    return collected, [len(prompt) for prompt in token_ids]


def _run_prompts(collector: RangeCollector, token_ids: list[list[int]], plan: _Plan, console: Console) -> None:
    """Run the prompts that are left, saving the state every few of them and when interrupted."""
    folder, done = plan.request.out, 0
    checkpoint = read_checkpoint(folder, plan.identity)
    if checkpoint is not None:
        collector.restore(checkpoint.ranges)
        done = checkpoint.done
        console.print(f"resuming an interrupted run: {done} of {len(token_ids)} prompts are done")
    with _progress(console) as progress:
        bar = progress.add_task("calibrating", total=len(token_ids), completed=done)
        try:
            while done < len(token_ids):
                collector.run(token_ids[done])
                done += 1
                progress.advance(bar)
                if done % PROMPTS_PER_CHECKPOINT == 0:
                    write_checkpoint(folder, Checkpoint(plan.identity, done, collector.ranges()))
        except KeyboardInterrupt:
            if done:
                write_checkpoint(folder, Checkpoint(plan.identity, done, collector.ranges()))
                console.print(f"saved after {done} of {len(token_ids)} prompts; run the same command to go on")
            raise


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("prompts"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )


def _write(plan: _Plan, ranges: dict[RangeKey, ChannelRange], lengths: list[int]) -> None:
    """The scales, then the report that names their hash: a kill between the two is noticed by whoever reads them."""
    tensors = {}
    for (layer, tensor), channels in ranges.items():
        tensors.update(range_tensors(layer, tensor, channels))
    out = plan.request.out
    atomic.write_bytes(out / SCALES_FILE, save(tensors))
    atomic.write_text(out / REPORT_FILE, json.dumps(_report(plan, ranges, lengths), indent=2) + "\n")


def _report(plan: _Plan, ranges: dict[RangeKey, ChannelRange], lengths: list[int]) -> dict[str, Any]:
    """The content of calibration.json: no dates and no times, so that equal runs give equal files."""
    outliers = find_outliers(ranges)
    return {
        "schema": SCHEMA,
        "identity": plan.identity,
        "model": {"recipe": plan.request.recipe.model_dump(), **plan.inputs["model"]},
        "prompts": {
            "origin": _portable(plan.prompt_set.origin),
            "sha256": plan.prompt_set.sha256,
            "in_set": len(plan.prompt_set.prompts),
            "used": plan.request.count,
            "seed": plan.request.seed,
            "max_tokens": plan.request.max_tokens,
            "tokens": sum(lengths),
            "longest": max(lengths),
            "categories": dict(sorted(Counter(prompt.category for prompt in plan.drawn).items())),
        },
        "versions": plan.inputs["versions"],
        "kv_scales_sha256": file_sha256(plan.request.out / SCALES_FILE),
        "layers": layer_statistics(ranges),
        "outliers": {
            "rule": f"absmax above {OUTLIER_RATIO:g} times the median channel of the layer",
            "count": len(outliers),
            "worst": [asdict(outlier) for outlier in outliers[:OUTLIER_ROWS]],
        },
    }


def _portable(origin: str) -> str:
    """A file of the repository by its place in it, so that two clones write the same report; others as given."""
    path = Path(origin)
    return path.relative_to(REPOSITORY_ROOT).as_posix() if path.is_relative_to(REPOSITORY_ROOT) else origin
