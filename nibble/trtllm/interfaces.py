"""What our cache takes from TensorRT-LLM, name by name, looked for in the package that is installed.

Its interfaces are private, so that a build of the same version may differ. Every worker looks before the first request
and refuses with the whole list of what is missing, instead of failing somewhere inside a step. The first thing to run
in a container that nobody has tried:

    python3 -m nibble.trtllm.interfaces          needs tensorrt_llm, no model and no free GPU memory
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nibble.errors import NibbleError
from nibble.stage import console, run_stage

TORCH = "tensorrt_llm._torch"


@dataclass(frozen=True)
class Interface:
    """An object of TensorRT-LLM. takes: parameters of it, or of its __init__; None for a class that we never make.

    has: methods and fields of a class; sets: attributes that its __init__ gives to each object.
    """

    module: str
    name: str
    takes: str | None = None
    has: str = ""
    sets: str = ""


INTERFACES = (
    Interface(f"{TORCH}.attention_backend.utils", "get_attention_backend", "backend_name"),
    Interface(
        f"{TORCH}.attention_backend.interface",
        "AttentionBackend",
        "layer_idx num_heads head_dim num_kv_heads quant_config",
        has="support_fused_rope support_fused_qkv support_mla",
    ),
    Interface(
        f"{TORCH}.attention_backend.interface",
        "AttentionMetadata",
        "max_num_requests max_num_tokens max_num_sequences kv_cache_manager request_ids kv_cache_params is_cuda_graph",
        has="prepare create_cuda_graph_metadata seq_lens num_contexts __post_init__",
    ),
    Interface(f"{TORCH}.metadata", "KVCacheParams", "num_cached_tokens_per_seq"),
    Interface(f"{TORCH}.pyexecutor._util", "get_kv_cache_manager_cls", "model_config"),
    Interface(
        f"{TORCH}.pyexecutor._util",
        "KvCacheCreator",
        "model_engine kv_cache_config mapping speculative_config max_beam_width kv_connector_manager",
        sets="_kv_cache_manager_cls",
    ),
    Interface(
        f"{TORCH}.pyexecutor.resource_manager",
        "KVCacheManager",
        "kv_cache_config kv_cache_type num_kv_heads head_dim tokens_per_block max_seq_len max_batch_size mapping dtype "
        "max_num_tokens",
        has="prepare_resources add_dummy_requests free_resources rewind_kv_cache get_cache_indices shutdown "
        "get_batch_cache_indices get_cache_bytes_per_token get_cache_size_per_token",
        sets="impl num_local_layers layer_offsets num_kv_heads_per_layer max_batch_size max_blocks_per_seq",
    ),
    Interface(
        f"{TORCH}.pyexecutor.llm_request",
        "LlmRequest",
        has="is_first_context_chunk context_current_position context_chunk_size prompt_len",
        sets="py_request_id",
    ),
    Interface("tensorrt_llm.bindings", "DataType", has="INT8"),
)


def check_interfaces(interfaces: tuple[Interface, ...] = INTERFACES) -> None:
    """NibbleError that lists all that the installed package lacks."""
    if importlib.util.find_spec("tensorrt_llm") is None:
        raise NibbleError(f"tensorrt_llm: {sys.executable} has none; use the Python of a pinned container")
    missing = [line for interface in interfaces for line in _missing(interface)]
    if missing:
        raise NibbleError(
            f"tensorrt_llm: this build lacks {'; '.join(missing)}. Allowed: the interfaces of 1.2.1 that nibble.trtllm "
            "is written against (docs/trtllm.md). Serve an engine of trtllm-build (KV=int8), or HOST=native"
        )


def _missing(interface: Interface) -> Iterator[str]:
    where = f"{interface.module}.{interface.name}"
    try:
        found = getattr(importlib.import_module(interface.module), interface.name, None)
    except ImportError as error:
        yield f"{where} ({error})"
        return
    if found is None:
        yield where
        return
    for kind, names in (("parameter", _parameters(found)), ("member", set(dir(found)))):
        wanted = (interface.takes or "") if kind == "parameter" else interface.has
        yield from (f"{kind} {name} of {where}" for name in wanted.split() if names is not None and name not in names)
    if interface.sets:
        source = _sources(found)
        lost = [name for name in interface.sets.split() if source and not re.search(rf"\bself\.{name}\b", source)]
        yield from (f"attribute {name} of {where}" for name in lost)


def _parameters(found: Any) -> set[str] | None:
    """Names that a call may give; None where Python can't tell or everything is taken."""
    try:
        return set(inspect.signature(found).parameters)
    except (TypeError, ValueError):
        return None


def _sources(found: Any) -> str:
    """The text of a class and its Python bases; empty where there is none to read."""
    texts = []
    for base in found.__mro__[:-1]:
        try:
            texts.append(inspect.getsource(base))
        except (OSError, TypeError):
            continue
    return "\n".join(texts)


def main() -> None:
    """Look at this Python's tensorrt_llm."""
    check_interfaces()
    console.print(f"tensorrt_llm has all {len(INTERFACES)} interfaces that our KV cache takes from it")


if __name__ == "__main__":
    run_stage(main)
