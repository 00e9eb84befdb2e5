"""Puts our classes where TensorRT-LLM 1.2.1 looks for its own, in every process, and proves that they are in use.

`arm` does not import TensorRT-LLM: it watches for two of its modules and patches each right after it was executed, so
that whoever imports from them later gets our functions.

    _torch.attention_backend.utils   get_attention_backend("NIBBLE") -> our AttentionBackend
    _torch.pyexecutor._util          get_kv_cache_manager_cls(...)   -> our KVCacheManager
                                     KvCacheCreator(...)             refuse what we can't do, then prove

TensorRT-LLM takes its own attention, silently, for a name that it does not know; hence the proof: every attention layer
of the model is counted, and its KV-cache manager's class is looked at, before the first request.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from nibble.errors import NibbleError
from nibble.trtllm.refusals import ATTENTION_BACKEND, ENGINE_VARIABLE, check_llm_arguments

VERSION = "1.2.1"
UTILS = "tensorrt_llm._torch.attention_backend.utils"
CREATOR = "tensorrt_llm._torch.pyexecutor._util"


def arm() -> None:
    """Watch for TensorRT-LLM's modules; patch at once those that are loaded already. Safe to call twice."""
    if any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Watcher())
    for name, patch in PATCHES.items():
        if name in sys.modules:
            patch(sys.modules[name])


def patch_attention(utils: ModuleType) -> None:
    """Give `get_attention_backend` our name. Modules that imported the function before get the new one too."""
    _check_version()
    original = _function(utils, "get_attention_backend")

    @functools.wraps(original)
    def get_attention_backend(backend_name: str, *arguments: Any, **options: Any) -> Any:
        if str(backend_name).upper() == ATTENTION_BACKEND:
            return our_classes()[0]
        return original(backend_name, *arguments, **options)

    _replace(utils, "get_attention_backend", original, get_attention_backend)


def patch_cache(util: ModuleType) -> None:
    """Give models with our attention our KV-cache manager, and let its creator refuse and prove."""
    _check_version()
    original = _function(util, "get_kv_cache_manager_cls")

    @functools.wraps(original)
    def get_kv_cache_manager_cls(model_config: Any, *arguments: Any, **options: Any) -> Any:
        if str(getattr(model_config, "attn_backend", "")).upper() == ATTENTION_BACKEND:
            return our_classes()[1]
        return original(model_config, *arguments, **options)

    _replace(util, "get_kv_cache_manager_cls", original, get_kv_cache_manager_cls)
    creator = _function(util, "KvCacheCreator")
    begin = creator.__init__

    @functools.wraps(begin)
    def init(self: Any, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        model = options["model_engine"].model
        if str(getattr(model.model_config, "attn_backend", "")).upper() == ATTENTION_BACKEND:
            check_llm_arguments(creator_arguments(options))
            prove(model, self._kv_cache_manager_cls)

    creator.__init__ = init


def creator_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """What a KvCacheCreator was given, in the words of llm.yaml."""
    config = options.get("kv_cache_config")
    names = (
        "dtype host_cache_size enable_partial_reuse enable_block_reuse tokens_per_block max_attention_window".split()
    )
    return {
        "speculative_config": options.get("speculative_config"),
        "sparse_attention_config": options.get("sparse_attention_config"),
        "kv_connector_config": options.get("kv_connector_manager"),
        "max_beam_width": options.get("max_beam_width"),
        "pipeline_parallel_size": getattr(options.get("mapping"), "pp_size", 1),
        "kv_cache_config": {name: getattr(config, name) for name in names if hasattr(config, name)},
    }


def prove(model: Any, manager_class: type[Any]) -> str:
    """A line for the log. NibbleError unless every attention layer and the KV-cache manager are ours."""
    attention, manager = our_classes()
    layers = [module.attn for module in model.modules() if hasattr(module, "attn")]
    foreign = sorted({type(layer).__name__ for layer in layers if not isinstance(layer, attention)})
    if not layers or foreign or manager_class is not manager:
        raise NibbleError(
            f"proof at start: attn_backend {ATTENTION_BACKEND} was asked for, but TensorRT-LLM uses "
            f"{', '.join(foreign) or 'no attention layer that could be found'} and {manager_class.__name__}; this "
            f"process was not armed in time: run `python3 -m nibble.trtllm.install` for its Python"
        )
    line = f"NibbleKV: {len(layers)} attention layers and the KV-cache manager are ours"
    print(line, flush=True)
    return line


@functools.cache
def our_classes() -> tuple[type[Any], type[Any]]:
    """Our attention and our manager over TensorRT-LLM's own classes. Imports them; NibbleError for a bad engine."""
    from tensorrt_llm._torch.attention_backend.interface import AttentionBackend, AttentionMetadata
    from tensorrt_llm._torch.pyexecutor.resource_manager import KVCacheManager
    from tensorrt_llm.bindings import DataType

    from nibble.trtllm.attention import make_attention_class
    from nibble.trtllm.cache_engine import CacheEngine
    from nibble.trtllm.interfaces import check_interfaces
    from nibble.trtllm.manager import make_manager_class
    from nibble.trtllm.metadata import make_metadata_class

    folder = os.environ.get(ENGINE_VARIABLE)
    if not folder:
        raise NibbleError(f"{ENGINE_VARIABLE} is not set; allowed: the folder of a native engine (make serve sets it)")
    check_interfaces()
    engine = CacheEngine.load(Path(folder))
    attention = make_attention_class(AttentionBackend, make_metadata_class(AttentionMetadata))
    return attention, make_manager_class(KVCacheManager, engine, DataType.INT8)


PATCHES: dict[str, Callable[[ModuleType], None]] = {UTILS: patch_attention, CREATOR: patch_cache}


class _Watcher(importlib.abc.MetaPathFinder):
    """Finds the watched modules as Python would, and patches each after it was executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader, PATCHES[name])
        return spec


class _PatchingLoader(importlib.abc.Loader):
    def __init__(self, loader: Any, patch: Callable[[ModuleType], None]) -> None:
        self._loader, self._patch = loader, patch

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._patch(module)


def _check_version() -> None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("tensorrt_llm")
    except PackageNotFoundError:
        found = "unknown"
    if found != VERSION:
        raise NibbleError(
            f"tensorrt_llm: got {found}, allowed {VERSION}: our cache is written against its interfaces "
            "(docs/trtllm.md says what later versions changed). Use a pinned container"
        )


def _function(module: ModuleType, name: str) -> Any:
    if not hasattr(module, name):
        raise NibbleError(f"{module.__name__} has no {name}: not the interfaces of {VERSION}")
    return getattr(module, name)


def _replace(owner: ModuleType, name: str, original: Any, ours: Any) -> None:
    """In the module and wherever TensorRT-LLM imported the function by name before."""
    setattr(owner, name, ours)
    for module in list(sys.modules.values()):
        known = getattr(module, "__dict__", {}).get(name) if module is not None else None
        if known is original and str(getattr(module, "__name__", "")).startswith("tensorrt_llm"):
            setattr(module, name, ours)
