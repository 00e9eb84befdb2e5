"""The bootstrap in a package laid out like TensorRT-LLM: patched on import, proved at start, refused otherwise."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from nibble.errors import NibbleError
from nibble.formats import KVFormat
from nibble.key_transform import KeyBias, KeyTransform
from nibble.trtllm import bootstrap, interfaces
from nibble.trtllm.cache_engine import CacheEngine, _check_layers
from nibble.trtllm.install import install
from tests.trtllm import stand_in
from tests.trtllm.test_driver import CPU, make_engine

FILES = {
    "__init__.py": "",
    "bindings.py": "from tests.trtllm.stand_in import DataType\n",
    "_torch/__init__.py": "",
    "_torch/metadata.py": "from tests.trtllm.stand_in import KVCacheParams\n",
    "_torch/attention_backend/__init__.py": "from .utils import get_attention_backend\n",
    "_torch/attention_backend/interface.py": "from tests.trtllm.stand_in import AttentionBackend, AttentionMetadata\n",
    "_torch/attention_backend/utils.py": "from tests.trtllm.stand_in import get_attention_backend\n",
    "_torch/pyexecutor/__init__.py": "",
    "_torch/pyexecutor/llm_request.py": "from tests.trtllm.stand_in import LlmRequest\n",
    "_torch/pyexecutor/resource_manager.py": "from tests.trtllm.stand_in import KVCacheManager\n",
    "_torch/pyexecutor/model_engine.py": "from ..attention_backend.utils import get_attention_backend\n",
    "_torch/pyexecutor/_util.py": (
        "from .resource_manager import KVCacheManager\n"
        "def get_kv_cache_manager_cls(model_config):\n"
        "    return KVCacheManager\n"
        "class KvCacheCreator:\n"
        "    def __init__(self, *, model_engine, kv_cache_config, mapping=None, speculative_config=None,\n"
        "                 max_beam_width=1, kv_connector_manager=None):\n"
        "        self._kv_cache_manager_cls = get_kv_cache_manager_cls(model_engine.model.model_config)\n"
    ),
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A tensorrt_llm 1.2.1 on the path, and a native engine that needs no file."""
    for name, text in FILES.items():
        path = tmp_path / "tensorrt_llm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    set_version(tmp_path, "1.2.1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TLLM_NIBBLE_ENGINE", str(tmp_path))
    monkeypatch.setattr(CacheEngine, "load", lambda folder: make_engine(CPU))
    yield tmp_path
    bootstrap.our_classes.cache_clear()
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, bootstrap._Watcher)]
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


def set_version(folder: Path, version: str) -> None:
    info = folder / "tensorrt_llm-1.2.1.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: {version}\n")


def imported(name: str) -> Any:
    return importlib.import_module(f"tensorrt_llm._torch.{name}")


def model(attn_backend: str, *attention: Any) -> Any:
    """A model as the creator of the KV cache sees it."""
    found = nn.Module()
    for number, layer in enumerate(attention):
        block = nn.Module()
        block.attn = layer
        found.add_module(str(number), block)
    found.model_config = SimpleNamespace(attn_backend=attn_backend)
    return SimpleNamespace(model=found)


def create(engine: Any, **changes: Any) -> Any:
    return imported("pyexecutor._util").KvCacheCreator(
        model_engine=engine, kv_cache_config=stand_in.KvCacheConfig(**changes.pop("cache", {})), **changes
    )


@pytest.mark.parametrize("is_early", [True, False], ids=["before the import", "after it"])
def test_our_classes_are_found_by_name(package: Path, is_early: bool) -> None:
    if is_early:
        bootstrap.arm()
    lookups = [imported(name).get_attention_backend for name in ("pyexecutor.model_engine", "attention_backend")]
    if not is_early:
        imported("pyexecutor._util")
        bootstrap.arm()
        lookups = [imported(name).get_attention_backend for name in ("pyexecutor.model_engine", "attention_backend")]
    attention, manager = bootstrap.our_classes()
    assert {lookup("NIBBLE") for lookup in lookups} == {attention}
    assert {lookup("TRTLLM") for lookup in lookups} == {stand_in.TrtllmAttention}
    util = imported("pyexecutor._util")
    assert util.get_kv_cache_manager_cls(SimpleNamespace(attn_backend="NIBBLE")) is manager
    assert util.get_kv_cache_manager_cls(SimpleNamespace(attn_backend="TRTLLM")) is stand_in.KVCacheManager


def test_the_proof_at_start(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bootstrap.arm()
    attention = bootstrap.our_classes()[0]
    create(model("NIBBLE", attention(0, 4, 32, 2), attention(1, 4, 32, 2)))
    assert "2 attention layers and the KV-cache manager are ours" in capsys.readouterr().out
    create(model("TRTLLM", stand_in.TrtllmAttention(0, 4, 32, 2)))
    assert capsys.readouterr().out == ""
    with pytest.raises(NibbleError, match="TensorRT-LLM uses TrtllmAttention"):
        create(model("NIBBLE", attention(0, 4, 32, 2), stand_in.TrtllmAttention(1, 4, 32, 2)))
    with pytest.raises(NibbleError, match="no attention layer that could be found"):
        create(model("NIBBLE"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculative_config": object()}, "speculative decoding"),
        ({"max_beam_width": 2}, "max_beam_width 2, allowed 1"),
        ({"mapping": stand_in.Mapping(pp_size=2)}, "pipeline_parallel_size 2 with enable_block_reuse"),
        ({"kv_connector_manager": object()}, "KV connectors"),
        ({"cache": {"host_cache_size": 1}}, "host_cache_size 1, allowed 0"),
        ({"cache": {"enable_partial_reuse": True}}, "enable_partial_reuse true, allowed false"),
        ({"cache": {"tokens_per_block": 32}}, "tokens_per_block 32, allowed 64"),
        ({"cache": {"dtype": "fp8"}}, "kv_cache_config.dtype 'fp8', allowed 'auto'"),
    ],
)
def test_what_a_worker_refuses(package: Path, changes: dict[str, Any], message: str) -> None:
    bootstrap.arm()
    with pytest.raises(NibbleError, match=message):
        create(model("NIBBLE", bootstrap.our_classes()[0](0, 4, 32, 2)), **changes)


def test_other_versions_are_refused(package: Path) -> None:
    set_version(package, "1.3.0rc5")
    bootstrap.arm()
    with pytest.raises(NibbleError, match=r"tensorrt_llm: got 1.3.0rc5, allowed 1.2.1"):
        imported("attention_backend.utils")


def test_a_python_without_the_package_is_named() -> None:
    with pytest.raises(NibbleError, match="has none; use the Python of a pinned container"):
        interfaces.check_interfaces()


def test_a_package_that_lacks_what_we_take_is_refused_by_name(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interfaces.main()
    assert "has all 9 interfaces" in capsys.readouterr().out
    manager = stand_in.KVCacheManager
    monkeypatch.delattr(manager, "get_cache_indices")
    monkeypatch.setattr(interfaces.inspect, "getsource", lambda _: "self.impl = self.layer_offsets = None")
    monkeypatch.setattr(stand_in, "get_attention_backend", lambda name, sparse: None)
    monkeypatch.delitem(sys.modules, "tensorrt_llm._torch.attention_backend.utils")
    (package / "tensorrt_llm" / "_torch" / "metadata.py").unlink()
    monkeypatch.delitem(sys.modules, "tensorrt_llm._torch.metadata")
    with pytest.raises(NibbleError) as refused:
        interfaces.check_interfaces()
    for expected in (
        "parameter backend_name of tensorrt_llm._torch.attention_backend.utils.get_attention_backend",
        "member get_cache_indices of tensorrt_llm._torch.pyexecutor.resource_manager.KVCacheManager",
        "attribute max_blocks_per_seq of tensorrt_llm._torch.pyexecutor.resource_manager.KVCacheManager",
        "tensorrt_llm._torch.metadata.KVCacheParams (No module named",
    ):
        assert expected in str(refused.value)


def test_layers_that_no_block_can_hold() -> None:
    formats = [KVFormat.named("int4"), KVFormat.named("int8")]
    with pytest.raises(NibbleError, match="layer 1 is stored as int8, layer 0 as int4"):
        _check_layers(formats, {})
    biased = KeyTransform(bias=KeyBias(*[make_engine(CPU, "int8-static").scales[0].k.scale] * 2))  # type: ignore[union-attr]
    with pytest.raises(NibbleError, match="layer 0: its K is stored without the bias of k_proj"):
        _check_layers(formats[:1], {0: biased})


def test_the_line_in_site_packages(tmp_path: Path) -> None:
    path = install(tmp_path, tmp_path / "site")
    assert path.name == "nibble_trtllm.pth" and "bootstrap.arm()" in path.read_text()
    if os.geteuid():
        with pytest.raises(NibbleError, match=r"can't write nibble_trtllm.pth"):
            install(tmp_path, Path("/proc/none"))
