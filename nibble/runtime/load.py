"""From an engine folder to a running engine: manifest and weights verified, scales read, the cache's shape settled."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig

from nibble.errors import NibbleError
from nibble.formats import FORMATS
from nibble.key_transform import read_key_transforms
from nibble.manifest import TOKENIZER_DIR, Manifest, read_manifest
from nibble.models import load_model, load_tokenizer
from nibble.recipes import FP8
from nibble.runtime.cache import CacheSpec
from nibble.runtime.decoder_weights import DecoderWeights
from nibble.runtime.device import choose_device, wants_gpu
from nibble.runtime.engine import Engine, EngineOrigin
from nibble.runtime.request import EngineLimits
from nibble.runtime.shards import WHOLE, Shards
from nibble.runtime.weight_sources import load_decoder_weights
from nibble.static_scales import read_static_scales
from nibble.visibility import PagePolicy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FALLBACKS = ("fp16",)
# Triton compiles kernels of their own for multiples of 16 tokens and for addresses that are none of 16 bytes, and so do
# products of up to 64 tokens. The longest of these prompts have far pages, recent ones and an open one.
WARM_UP_TOKENS = (385, 388, 384, 48, 41, 32, 21, 20, 16, 12, 9)
LEAST_FOR_FP8 = (8, 9)  # compute capability: products of e4m3


def load_engine(engine_dir: Path, limits: EngineLimits, kv_fallback: str | None = None) -> Engine:
    """See `Engine.load`. Raises NibbleError when a file is missing or differs from what the build wrote."""
    if kv_fallback not in (None, *FALLBACKS):
        raise NibbleError(f"KV fallback: got {kv_fallback!r}, allowed {', '.join(FALLBACKS)} or none")
    recipe = read_manifest(engine_dir).model.recipe
    if recipe.tensor_parallel > 1 and wants_gpu(limits.device):
        from nibble.runtime.parallel import load_leading_engine

        engine = load_leading_engine(engine_dir, limits, recipe.tensor_parallel, kv_fallback)
    else:
        engine = load_rank(engine_dir, limits, kv_fallback, WHOLE, Engine)
    warm_up(engine)
    return engine


def warm_up(engine: Engine) -> None:
    """On a GPU, compile what prompts need before the first request would wait for it."""
    if engine.device.type == "cuda":
        for tokens in WARM_UP_TOKENS:
            for _ in engine.logits([0] * min(engine.limits.max_context, tokens)):
                pass


def load_rank(
    engine_dir: Path, limits: EngineLimits, kv_fallback: str | None, shards: Shards, engine_class: type[Engine]
) -> Engine:
    """One rank's engine; the only one unless the model is split."""
    manifest = read_manifest(engine_dir)
    manifest.verify_weights(engine_dir)
    tokenizer = load_tokenizer(engine_dir / TOKENIZER_DIR)
    origin = EngineOrigin(manifest.kv.recipe.name, manifest)
    if kv_fallback and kv_fallback != origin.kv_name:
        reason = f"KV_FALLBACK={kv_fallback} was asked for; the engine was built with {origin.kv_name}"
        origin = EngineOrigin(kv_fallback, manifest, fallback_reason=reason)
    spec = _cache_spec(engine_dir, manifest, origin.kv_name)
    source, dtype = manifest.source_folder(engine_dir), manifest.model.recipe.dtype
    model = _load_weights(source, dtype, spec, limits, shards)
    return engine_class(model, tokenizer, spec, limits, origin=origin)


def _load_weights(
    source: Path, dtype: str, spec: CacheSpec, limits: EngineLimits, shards: Shards
) -> PreTrainedModel | DecoderWeights:
    """Where the engine will run decides: transformers' model for the CPU, bare weights streamed to a GPU."""
    device = choose_device(limits.device, AutoConfig.from_pretrained(source, local_files_only=True), spec)
    if dtype == FP8 and (device.type == "cpu" or torch.cuda.get_device_capability(device) < LEAST_FOR_FP8):
        raise NibbleError(
            f"weights: got fp8 on device {device.type}, allowed there: float32, bfloat16, float16; fp8 needs an NVIDIA "
            "GPU of compute capability 8.9 or newer. Serve the engine that was built without WEIGHTS=fp8"
        )
    if device.type == "cpu":
        return load_model(source, dtype)
    return load_decoder_weights(source, dtype, device, shards, spec.rotated_layers)


def _cache_spec(engine_dir: Path, manifest: Manifest, kv_name: str) -> CacheSpec:
    model, policy = manifest.model, PagePolicy(manifest.policy.sink_pages, manifest.policy.recent_pages)
    built = manifest.layer_formats()
    formats = built if kv_name == manifest.kv.recipe.name else [FORMATS[kv_name]] * model.num_layers
    scales = dict(enumerate(read_static_scales(engine_dir, formats)))
    transforms = {} if kv_name in FALLBACKS else read_key_transforms(engine_dir)
    return CacheSpec(tuple(formats), model.num_kv_heads, model.head_dim, policy, scales, transforms)
