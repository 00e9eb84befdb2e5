"""The exact call of trtllm-build for a plan, parsed by the recorded argument parser before it is shown or run."""

from __future__ import annotations

from pathlib import Path

from build.trtllm.plan import CHECKPOINT, ENGINE, EnginePlan
from build.trtllm.schema import build_parser


def build_command(plan: EnginePlan, folder: Path) -> list[str]:
    """Program and arguments. folder: of the engine.

    KV cache type is no flag: the builder takes it from the checkpoint's config.json.
    """
    flags = {
        "checkpoint_dir": f"{folder}/{CHECKPOINT}",
        "output_dir": f"{folder}/{ENGINE}",
        "max_batch_size": plan.limits.max_running,
        "max_input_len": plan.limits.max_context - 1,
        "max_seq_len": plan.limits.max_context,
        "max_num_tokens": plan.max_num_tokens,
        "max_beam_width": 1,
        "kv_cache_type": "paged",
        "tokens_per_block": plan.recipe.tokens_per_block,
        "remove_input_padding": "enable",
        "context_fmha": "enable",
        "use_paged_context_fmha": _switch(plan.recipe.paged_context_fmha),
        "use_fp8_context_fmha": "disable",
        "gpt_attention_plugin": plan.config["dtype"],
        "gemm_plugin": plan.config["dtype"],
        "workers": min(plan.parallel.world_size, plan.parallel.gpus_per_node),
    }
    arguments = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    build_parser().parse_args(arguments)
    return ["trtllm-build", *arguments]


def flag_meanings(plan: EnginePlan) -> dict[str, str]:
    """Why the flags that matter have their values."""
    prompts = "a prompt is cut into chunks" if plan.reuses_blocks else "a prompt must fit whole: no chunked context"
    return {
        "--max_num_tokens": f"tokens of one step; {prompts}",
        "--kv_cache_type paged": "blocks that sequences take as they grow; in-flight batching needs it",
        "--tokens_per_block": "tokens of a block of the cache",
        "--use_paged_context_fmha": "prefill that reads the cache in blocks: block reuse and chunked context need it"
        + ("" if plan.reuses_blocks else f"; off, since it can't read an {plan.recipe.cache} cache"),
        "--use_fp8_context_fmha": "off: it needs fp8 weights",
        "--workers": "ranks built at the same time, one a GPU",
    }


def _switch(is_on: bool) -> str:
    return "enable" if is_on else "disable"
