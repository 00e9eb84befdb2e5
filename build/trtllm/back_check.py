"""Compares config.json of a built engine with what was asked for.

The builder takes the cache's type from the checkpoint and changes flags on its own, so only its own record says whether
the cache is really int8 and whether blocks have the size that was asked for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from build.trtllm.plan import EnginePlan
from nibble.errors import NibbleError
from nibble.trtllm.container import read_pins
from nibble.trtllm.manifest import EngineEntry


def read_engine(folder: Path) -> EngineEntry:
    """What an engine's config.json says. NibbleError when it can't be read or lacks a key."""
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        build, plugins = content["build_config"], content["build_config"]["plugin_config"]
        return EngineEntry(
            version=content["version"],
            kv_cache_quant_algo=content["pretrained_config"]["quantization"]["kv_cache_quant_algo"],
            tokens_per_block=plugins["tokens_per_block"],
            paged_context_fmha=plugins["use_paged_context_fmha"],
            max_batch_size=build["max_batch_size"],
            max_seq_len=build["max_seq_len"],
            max_num_tokens=build["max_num_tokens"],
        )
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise NibbleError(f"{path}: not the config.json of an engine of 1.2.1 ({error!r}); build again") from error


def check_engine(folder: Path, plan: EnginePlan) -> EngineEntry:
    """The engine's record, once it agrees with the plan and all ranks are there. NibbleError names each difference."""
    found = read_engine(folder)
    asked: dict[str, Any] = {
        "version": read_pins()["tensorrt_llm"],
        "kv_cache_quant_algo": plan.config["quantization"]["kv_cache_quant_algo"],
        "tokens_per_block": plan.recipe.tokens_per_block,
        "paged_context_fmha": plan.recipe.paged_context_fmha,
        "max_batch_size": plan.limits.max_running,
        "max_seq_len": plan.limits.max_context,
        "max_num_tokens": plan.max_num_tokens,
    }
    wrong = [f"{key}: got {getattr(found, key)!r}, asked {value!r}" for key, value in asked.items()]
    wrong = [line for line, (key, value) in zip(wrong, asked.items(), strict=True) if getattr(found, key) != value]
    missing = [rank for rank in range(plan.parallel.world_size) if not (folder / f"rank{rank}.engine").is_file()]
    if missing:
        wrong.append(f"no engine of ranks {', '.join(map(str, missing))}")
    if wrong:
        raise NibbleError(f"{folder}: the engine is not what was asked for: " + "; ".join(wrong))
    return found
