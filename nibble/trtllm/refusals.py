"""What our cache does not do inside TensorRT-LLM: one list, checked when an engine is built and when a worker starts.

Each is an error that names the setting and the way out. Nothing falls back silently.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nibble.errors import NibbleError
from nibble.formats import PAGE_TOKENS

ATTENTION_BACKEND = "NIBBLE"  # attn_backend of LLM(): TensorRT-LLM takes any string
ENGINE_VARIABLE = "TLLM_NIBBLE_ENGINE"  # TensorRT-LLM hands TLLM_* and TRTLLM_* alone to its workers

_OFF = {
    "speculative_config": "speculative decoding: drafted tokens are rolled back, and a sealed page can't be reopened",
    "cache_transceiver_config": "disaggregated serving: the transfer knows TensorRT-LLM's own layout of blocks only",
    "kv_connector_config": "KV connectors: they copy blocks by TensorRT-LLM's own layout",
    "sparse_attention_config": "sparse attention: it reads keys that our pages do not hold",
}


def check_llm_arguments(arguments: dict[str, Any]) -> None:
    """NibbleError with every argument of LLM() that our cache can't do. arguments: as in llm.yaml."""
    found = list(_complaints(arguments))
    if found:
        raise NibbleError("KV cache on TensorRT-LLM: " + "; ".join(found))


def _complaints(arguments: dict[str, Any]) -> Iterator[str]:
    for name, why in _OFF.items():
        if arguments.get(name):
            yield f"{name} is set, allowed: nothing ({why})"
    if (beams := arguments.get("max_beam_width") or 1) > 1:
        yield f"max_beam_width {beams}, allowed 1 (beams share and copy blocks in mid-page)"
    cache = arguments.get("kv_cache_config") or {}
    if (stages := arguments.get("pipeline_parallel_size") or 1) > 1 and cache.get("enable_block_reuse", True):
        yield (
            f"pipeline_parallel_size {stages} with enable_block_reuse, allowed 1 or no reuse (stages run apart in "
            "time, and could take over different lengths of a prefix)"
        )
    if cache.get("host_cache_size"):
        yield f"host_cache_size {cache['host_cache_size']}, allowed 0 (an offloaded block would lose its fp16 copy)"
    if cache.get("enable_partial_reuse", True) and cache.get("enable_block_reuse", True):
        yield "enable_partial_reuse true, allowed false (a page has one scale a channel: its tokens can't be split)"
    if (tokens := cache.get("tokens_per_block", 32)) != PAGE_TOKENS:
        yield f"tokens_per_block {tokens}, allowed {PAGE_TOKENS} (a block is one of our pages)"
    if cache.get("max_attention_window"):
        yield "max_attention_window is set, allowed: nothing (blocks outside a window would be freed)"
    if cache.get("dtype", "auto") != "auto":
        yield f"kv_cache_config.dtype {cache['dtype']!r}, allowed 'auto' (our engine says what the cache is)"
