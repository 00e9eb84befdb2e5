"""From an engine folder to a running engine: manifest and weights verified, scales read, the cache's shape settled."""

from __future__ import annotations

from pathlib import Path

from nibble.errors import NibbleError
from nibble.formats import FORMATS
from nibble.key_transform import read_key_transforms
from nibble.manifest import TOKENIZER_DIR, Manifest, read_manifest
from nibble.models import load_model, load_tokenizer
from nibble.runtime.cache import CacheSpec
from nibble.runtime.engine import Engine, EngineOrigin
from nibble.runtime.request import EngineLimits
from nibble.static_scales import read_static_scales
from nibble.visibility import PagePolicy

FALLBACKS = ("fp16",)


def load_engine(engine_dir: Path, limits: EngineLimits, kv_fallback: str | None = None) -> Engine:
    """See `Engine.load`. Raises NibbleError when a file is missing or differs from what the build wrote."""
    if kv_fallback not in (None, *FALLBACKS):
        raise NibbleError(f"KV fallback: got {kv_fallback!r}, allowed {', '.join(FALLBACKS)} or none")
    manifest = read_manifest(engine_dir)
    manifest.verify_weights(engine_dir)
    model = load_model(manifest.source_folder(engine_dir), manifest.model.recipe.dtype)
    tokenizer = load_tokenizer(engine_dir / TOKENIZER_DIR)
    origin = EngineOrigin(manifest.kv.recipe.name, manifest)
    if kv_fallback and kv_fallback != origin.kv_name:
        reason = f"KV_FALLBACK={kv_fallback} was asked for; the engine was built with {origin.kv_name}"
        origin = EngineOrigin(kv_fallback, manifest, fallback_reason=reason)
    return Engine(model, tokenizer, _cache_spec(engine_dir, manifest, origin.kv_name), limits, origin=origin)


def _cache_spec(engine_dir: Path, manifest: Manifest, kv_name: str) -> CacheSpec:
    model, policy = manifest.model, PagePolicy(manifest.policy.sink_pages, manifest.policy.recent_pages)
    built = manifest.layer_formats()
    formats = built if kv_name == manifest.kv.recipe.name else [FORMATS[kv_name]] * model.num_layers
    scales = dict(enumerate(read_static_scales(engine_dir, formats)))
    transforms = {} if kv_name in FALLBACKS else read_key_transforms(engine_dir)
    return CacheSpec(tuple(formats), model.num_kv_heads, model.head_dim, policy, scales, transforms)
