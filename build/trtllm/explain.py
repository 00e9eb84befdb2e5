"""The steps of a build for TensorRT-LLM in plain words: what is done, why, and the command where there is one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from build.trtllm.command import build_command, flag_meanings
from build.trtllm.llm_arguments import llm_arguments
from build.trtllm.model_config import KV_ALGORITHM
from build.trtllm.plan import CHECKPOINT, ENGINE, EnginePlan
from build.trtllm.xqa import predictions
from nibble.kernels.compiler import ARCHITECTURES
from nibble.trtllm.container import Runner, shell_line

SWITCHES = {
    "TRTLLM_FORCE_XQA": "XQA also where KV heads times batch do not fill the GPU",
    "TRTLLM_ENABLE_XQA_JIT": "XQA compiled for this shape where no kernel was shipped for it",
    "TRTLLM_XQA_BLOCKS_PER_SEQUENCE": "blocks that share a long sequence in XQA",
    "TRTLLM_ENABLE_MMHA_MULTI_BLOCK_DEBUG": "several blocks a sequence in the older MMHA kernel",
    "TRTLLM_LOAD_KV_SCALES": "whether the PyTorch runtime reads KV scales of a checkpoint",
}


@dataclass(frozen=True)
class Step:
    """One step. command: as a person would type it, None for a step of our own code. text: a file, as it will be."""

    title: str
    words: str
    command: str | None = None
    text: str = ""


def engine_steps(plan: EnginePlan, runner: Runner) -> list[Step]:
    """The steps to an engine of trtllm-build, and what serves it."""
    return [
        *_scale_steps(plan),
        *_checkpoint_steps(plan),
        _build_step(plan, runner),
        _check_step(plan),
        _serve_step(plan),
    ]


def pytorch_steps(plan: EnginePlan) -> list[Step]:
    """The steps to our cache inside TensorRT-LLM's PyTorch runtime, and what serves it."""
    layers, heads, width = (plan.config[name] for name in ("num_hidden_layers", "num_key_value_heads", "head_size"))
    fp16 = 4 * layers * heads * width
    reuse = "whole blocks reused" if plan.parallel.pipeline == 1 else "no block reuse (stages run apart in time)"
    return [
        Step(
            "native engine",
            f"TensorRT-LLM has no {plan.recipe.cache} cache, so nothing that trtllm-build could build. The "
            "native engine is made first (or found): pre-flight, formats of each layer, bases of K, static scales, and "
            "its self-check on real pages. The same files run on both hosts.",
            f"make engine MODEL={plan.model.name} KV={plan.recipe.name}",
        ),
        Step(
            "arguments of LLM()",
            f"llm.yaml for its PyTorch runtime: the model's Hugging Face folder as it is, {_gpus(plan)}, blocks of "
            f"{plan.recipe.tokens_per_block} tokens (our page), {reuse}, no host offload, attn_backend NIBBLE. What "
            "our cache can't do is refused here and again when a worker starts.",
            text=yaml.safe_dump(llm_arguments(plan, Path("MODEL")), sort_keys=False),
        ),
        Step(
            "how it gets in",
            "One line in the container's site-packages (nibble_trtllm.pth) starts nibble.trtllm.bootstrap in every "
            "Python process, workers of other ranks included. It waits for TensorRT-LLM's modules and puts our "
            "attention and our KV-cache manager where they look theirs up; at start it proves that they are in use, "
            "since TensorRT-LLM takes its own when it does not know a name, without a word. Before that it looks for "
            "every interface that it takes, and refuses a build that lacks one.",
        ),
        Step(
            "what a token takes",
            "Sealed pages lie in TensorRT-LLM's own block pool as bytes, scales inside the page. Sink, recent and open "
            "pages lie in an fp16 pool beside it, about three pages a running sequence and those of one prefill step. "
            f"A sealed token takes {plan.bytes_per_token:,.0f} bytes on all ranks together, {fp16:,} in fp16.",
        ),
        Step(
            "decode attention",
            f"Our kernels, compiled at first use for {', '.join(ARCHITECTURES)}; run so far on sm_90 alone (H200). "
            "TensorRT-LLM's XQA has no part in it, nor have its switches.",
        ),
        _serve_step(plan),
    ]


def print_steps(console: Console, steps: list[Step]) -> None:
    """Number and print them."""
    for number, step in enumerate(steps, 1):
        console.print(f"[bold]{number}. {step.title}[/]", highlight=False)
        console.print(Padding(Text(step.words), (0, 0, 0, 3)))
        for line in step.text.splitlines():
            console.print(Text(f"   | {line}"), soft_wrap=True)
        if step.command:
            console.print(Text(f"   $ {step.command}"), soft_wrap=True)


def xqa_table(plan: EnginePlan) -> Table:
    """Which decode kernel each GPU generation will run."""
    shape = plan.attention
    title = f"Decode attention: {shape.cache} cache, group {shape.group}, head size {shape.head_size}, {shape.dtype}"
    table = Table(title=title, title_justify="left")
    for heading in ("GPU", "kernel", "why"):
        table.add_column(heading)
    for found in predictions(shape):
        kernel = f"[green]XQA {found.kernel}[/]" if found.kernel else "[yellow]MMHA, or none[/]"
        table.add_row(f"sm_{found.architecture} ({found.gpus})", kernel, found.why)
    return table


def _scale_steps(plan: EnginePlan) -> list[Step]:
    if plan.recipe.cache == "fp16":
        return []
    largest = {"int8": 127, "fp8": 448}[plan.recipe.cache]
    return [
        Step(
            "scales",
            f"The calibration (made now when it is missing) has the range of every channel of K after RoPE and of V. "
            f"TensorRT-LLM takes one scale a layer for both: the largest magnitude over {largest}. Q has no part in "
            "it, though TensorRT-LLM's own converter puts it in. A scale that is missing, not finite or exactly 1.0 "
            "stops the build and names the layer."
            + (
                " So does a layer whose usual channel of K would get a handful of codes."
                if plan.recipe.cache == "int8"
                else ""
            ),
            f"make calibrate MODEL={plan.model.name}",
        )
    ]


def _checkpoint_steps(plan: EnginePlan) -> list[Step]:
    algorithm = KV_ALGORITHM[plan.recipe.cache] or "none"
    return [
        Step(
            "checkpoint",
            f"config.json (kv_cache_quant_algo {algorithm}) and {plan.parallel.world_size} files rank*.safetensors in "
            f"{plan.target.name}/{CHECKPOINT}: {_gpus(plan)}; Q, K and V of a layer are one tensor, KV heads fewer "
            "than ranks are repeated. Each file is read back and compared with the names, shapes and types of 1.2.1.",
        )
    ]


def _build_step(plan: EnginePlan, runner: Runner) -> Step:
    meanings = "".join(f"\n{flag}: {meaning}" for flag, meaning in flag_meanings(plan).items())
    where = f"inside {runner.image}" if runner.image else "on this host, where tensorrt_llm is installed"
    line = runner.command(build_command(plan, plan.target), {})
    return Step("engine", f"trtllm-build runs {where}.{meanings}", shell_line(line))


def _check_step(plan: EnginePlan) -> Step:
    return Step(
        "check",
        f"config.json of {plan.target.name}/{ENGINE} is compared with what was asked: version, type of the cache, "
        f"block size, paged context FMHA, batch, lengths. The manifest records it. The cache takes "
        f"{plan.bytes_per_token:,.0f} bytes a token on all ranks together.",
    )


def _serve_step(plan: EnginePlan) -> Step:
    """How it is started, and what its configuration follows from."""
    parallel, is_engine = plan.parallel, plan.recipe.runtime == "tensorrt"
    nodes = -(-parallel.world_size // parallel.gpus_per_node)
    if parallel.world_size == 1 or (nodes == 1 and not is_engine):
        start = "one Triton process" + ("" if parallel.world_size == 1 else ", which starts a worker a GPU itself")
    elif nodes == 1:
        start = f"mpirun -n {parallel.world_size}: a Triton process a GPU, of which rank 0 takes the requests"
    else:
        start = f"srun over {nodes} machines, {parallel.world_size} processes" + (
            "" if is_engine else " joined by trtllm-llmapi-launch"
        )
    rows = [f"Started by {start}."]
    if is_engine:
        switch = "on" if plan.reuses_blocks else "off: the engine has no paged context FMHA"
        rows.append(f"config.pbtxt follows config.json of the engine: block reuse and chunked context are {switch}.")
    rows += [f"{name}={value}: {SWITCHES[name]}" for name, value in sorted(plan.recipe.environment.items())]
    command = f"make serve MODEL={plan.model.name} KV={plan.recipe.name} HOST=trtllm"
    return Step("serve", "\n".join(rows), command)


def _gpus(plan: EnginePlan) -> str:
    parallel = plan.parallel
    stages = f", {parallel.pipeline} pipeline stages" if parallel.pipeline > 1 else ""
    return f"tensor parallel over {parallel.tensor} GPU{'s' if parallel.tensor > 1 else ''}{stages}"
