"""llm.yaml: the arguments of TensorRT-LLM's LLM() for its PyTorch runtime with our cache.

Whatever our cache can't do is switched off here by name, so that nothing depends on a default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from build.trtllm.plan import EnginePlan
from build.trtllm.schema import read_data
from nibble.errors import NibbleError
from nibble.trtllm.refusals import ATTENTION_BACKEND

GRAPH_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def llm_arguments(plan: EnginePlan, source: Path) -> dict[str, Any]:
    """Arguments of LLM(). source: the model's Hugging Face folder."""
    batch = plan.limits.max_running
    arguments: dict[str, Any] = {
        "model": str(source),
        "backend": "pytorch",
        "attn_backend": ATTENTION_BACKEND,
        "dtype": plan.config["dtype"],
        "tensor_parallel_size": plan.parallel.tensor,
        "pipeline_parallel_size": plan.parallel.pipeline,
        "gpus_per_node": plan.parallel.gpus_per_node,
        "max_batch_size": batch,
        "max_input_len": plan.limits.max_context - 1,
        "max_seq_len": plan.limits.max_context,
        "max_num_tokens": plan.max_num_tokens,
        "max_beam_width": 1,
        "enable_chunked_prefill": plan.reuses_blocks,
        "disable_overlap_scheduler": True,
        "cuda_graph_config": {"batch_sizes": graph_batches(batch), "enable_padding": True},
        "kv_cache_config": {
            "dtype": "auto",
            "tokens_per_block": plan.recipe.tokens_per_block,
            "enable_block_reuse": plan.reuses_blocks and plan.parallel.pipeline == 1,
            "enable_partial_reuse": False,
            "copy_on_partial_reuse": False,
            "host_cache_size": 0,
            "free_gpu_memory_fraction": plan.recipe.free_gpu_memory_fraction,
        },
    }
    check_names(arguments)
    return arguments


def check_names(arguments: dict[str, Any]) -> None:
    """NibbleError naming an argument that LLM() of 1.2.1 does not have: it refuses unknown ones."""
    recorded = read_data("llm_arguments")
    for owner, part in (
        ("llm", arguments),
        *((key, arguments[key]) for key in ("cuda_graph_config", "kv_cache_config")),
    ):
        if unknown := sorted(part.keys() - set(recorded[owner])):
            raise NibbleError(f"llm.yaml: {owner}: got {', '.join(unknown)}, allowed {', '.join(recorded[owner])}")


def graph_batches(batch: int) -> list[int]:
    """Batch sizes that decode graphs are captured for: powers of two below the largest batch, and that one."""
    return [size for size in GRAPH_BATCHES if size < batch] + [batch]
