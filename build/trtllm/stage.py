"""The build stage with HOST=trtllm: from the command line to a plan, from there to a dry run or an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from build.trtllm.engine import build_tensorrt_engine, explain_plan, write_pytorch_engine
from build.trtllm.layout import Parallelism
from build.trtllm.plan import EnginePlan, known_config, make_plan
from build.trtllm.recipes import load_host_recipe
from nibble.errors import NibbleError
from nibble.models import check_family, resolve_source
from nibble.paths import source_dir
from nibble.recipes import ModelRecipe, ServeRecipe, load_model_recipe
from nibble.trtllm.container import choose_runner

Limits = Callable[[ModelRecipe, int, int | None, int | None], ServeRecipe]
NativeBuild = Callable[[str, str, int | None, int | None], Path]


@dataclass(frozen=True)
class TrtllmRequest:
    """Values of the command line. None leaves it to the recipes. tag: of tritonserver's image."""

    model: str
    kv: str
    context: int | None = None
    batch: int | None = None
    tensor: int | None = None
    pipeline: int = 1
    gpus_per_node: int = 8
    tag: str | None = None
    is_dry_run: bool = False


def build_for_trtllm(request: TrtllmRequest, limits: Limits, build_native: NativeBuild, console: Console) -> None:
    """Explain, and unless it is a dry run, build. build_native: makes a native engine and returns its folder."""
    model, recipe = load_model_recipe(request.model), load_host_recipe(request.kv)
    source = local_source(model) if request.is_dry_run else resolve_source(model)
    runner = choose_runner(request.tag, is_dry_run=request.is_dry_run or recipe.runtime == "pytorch")
    plan = plan_request(request, model, source, limits)
    explain_plan(plan, runner, console)
    if request.is_dry_run:
        console.print("[bold]DRY_RUN=1: nothing was written or run.[/]")
        return
    assert source is not None
    if recipe.runtime == "tensorrt":
        manifest = build_tensorrt_engine(plan, source, runner, console)
    else:
        native = build_native(request.model, recipe.cache, request.context, request.batch)
        manifest = write_pytorch_engine(plan, source, native, console)
    console.print(f"engine {plan.target}: {manifest.cache} cache, {manifest.runtime} runtime", soft_wrap=True)


def plan_request(request: TrtllmRequest, model: ModelRecipe, source: Path | None, limits: Limits) -> EnginePlan:
    """The plan of a request. Raises NibbleError for values that no engine can have."""
    for name, value in (("TP", request.tensor), ("PP", request.pipeline), ("GPUS_PER_NODE", request.gpus_per_node)):
        if value is not None and value < 1:
            raise NibbleError(f"{name}: got {value}, allowed 1 or more")
    config = known_config(model, source)
    serve = limits(model, int(config["max_position_embeddings"]), request.context, request.batch)
    parallel = Parallelism(request.tensor or model.tensor_parallel, request.pipeline, request.gpus_per_node)
    return make_plan(model, load_host_recipe(request.kv), config, parallel, serve)


def local_source(model: ModelRecipe) -> Path | None:
    """The model's folder when it is on this machine; nothing is fetched."""
    folder = source_dir(model.name) if model.source.startswith("pypi:") else Path(model.source).expanduser()
    if not (folder / "config.json").is_file():
        return None
    check_family(folder)
    return folder
