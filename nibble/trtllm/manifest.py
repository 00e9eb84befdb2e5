"""manifest.json of an engine for TensorRT-LLM: what was asked, what the builder says it built, and what serves it.

    engines/<model>/<kv>-trtllm/manifest.json

An engine of trtllm-build has `engine`: the parts of its config.json that were compared with what was asked. One for the
PyTorch runtime has `native`: the folder of the native engine whose formats, bases and static scales it runs with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from nibble import atomic
from nibble.errors import NibbleError
from nibble.recipes import ModelRecipe, ServeRecipe
from nibble.strict_yaml import StrictModel, validate

MANIFEST_FILE = "manifest.json"
LLM_FILE = "llm.yaml"
SCHEMA = 1


class ParallelEntry(StrictModel):
    """GPUs: tensor parallel times pipeline stages, and how many of them a node has."""

    tensor: int
    pipeline: int
    gpus_per_node: int


class EngineEntry(StrictModel):
    """What the builder wrote into the engine's config.json."""

    version: str
    kv_cache_quant_algo: str | None
    tokens_per_block: int
    paged_context_fmha: bool
    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int


class TrtllmManifest(StrictModel):
    """All of manifest.json. cache: fp16, int8, fp8, or one of our formats. environment: of the serving process."""

    schema_version: Literal[1] = Field(alias="schema")
    host: Literal["trtllm"]
    runtime: Literal["tensorrt", "pytorch"]
    model: ModelRecipe
    cache: str
    source: str
    parallel: ParallelEntry
    limits: ServeRecipe
    reuses_blocks: bool
    max_num_tokens: int
    tokens_per_block: int
    free_gpu_memory_fraction: float
    environment: dict[str, str]
    bytes_per_token: float
    calibration_sha256: str | None
    engine: EngineEntry | None
    native: str | None
    tensorrt_llm: str
    created: str


def write_trtllm_manifest(folder: Path, content: dict[str, Any]) -> TrtllmManifest:
    """Check and write manifest.json, atomically."""
    manifest = validate(TrtllmManifest, content, str(folder))
    text = json.dumps(manifest.model_dump(by_alias=True), indent=2) + "\n"
    atomic.write_text(folder / MANIFEST_FILE, text)
    return manifest


def read_trtllm_manifest(folder: Path) -> TrtllmManifest:
    """Read it back. NibbleError when it is missing or damaged."""
    path = folder / MANIFEST_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise NibbleError(f"{path}: no engine for TensorRT-LLM there; run `make engine HOST=trtllm` first") from error
    return validate(TrtllmManifest, content, str(path))
