"""An engine of dummy weights: built from a config alone, the same on both runners, and never certified."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import eval.certify
from build.run import build_native
from nibble.certificate import Standing, check_certificate
from nibble.errors import NibbleError
from nibble.models import load_model, resolve_source
from nibble.recipes import load_model_recipe
from nibble.runtime import Engine, EngineLimits, SamplingParams
from nibble.runtime.decoder_weights import DecoderWeights
from nibble.runtime.fp8_rows import Fp8Rows
from nibble.runtime.weight_sources import ModelWeights, load_decoder_weights


@pytest.fixture
def dummy(tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a dummy whose folder holds a config and nothing else."""
    monkeypatch.setenv("NIBBLE_ENGINES", str(tmp_path / "engines"))
    (tmp_path / "tiny").mkdir()
    shutil.copyfile(tiny_llama_dir / "config.json", tmp_path / "tiny" / "config.json")
    return f"dummy:{tmp_path / 'tiny'}"


def test_an_engine_of_dummy_weights_answers_and_is_not_certified(dummy: str, tmp_path: Path) -> None:
    manifest = build_native(dummy, "int4", 512, 2)
    folder = tmp_path / "engines" / "tiny-dummy" / "int4"
    engine = Engine.load(folder, EngineLimits(max_context=512, max_running=2, device="cpu"))
    chat = [{"role": "user", "content": "Hi"}]
    assert engine.tokenizer.apply_chat_template(chat, tokenize=False) == "user: Hi\nassistant: "
    answers = [engine.generate([list(range(200))], SamplingParams(max_tokens=4))[0] for _ in range(2)]
    assert len(answers[0].token_ids) == 4 and answers[0].token_ids == answers[1].token_ids
    standing, reason = check_certificate(folder, manifest)
    assert standing is Standing.MISSING and "answers at random and can't be certified" in reason
    with pytest.raises(NibbleError, match=r"WEIGHTS=dummy\), so there is no quality to measure and none to certify"):
        eval.certify.main(["--model", dummy, "--kv", "int4", "--quick"])


def test_both_runners_get_the_same_weights(dummy: str) -> None:
    source = resolve_source(load_model_recipe(dummy))
    model, device = load_model(source, "float32"), torch.device("cpu")
    theirs = DecoderWeights.read(model.config, ModelWeights(model), torch.float32, device)
    ours = load_decoder_weights(source, "float32", device)
    assert torch.equal(ours.embedding, theirs.embedding) and ours.embedding.std() > 0.01
    assert torch.equal(ours.layers[1].qkv, theirs.layers[1].qkv)


def test_fp8_weights_are_a_type_of_serving_on_a_gpu(dummy: str, tmp_path: Path) -> None:
    """Built as any engine; read in e4m3 with V rotated as the cache wants it; refused by name on a CPU."""
    manifest = build_native(f"fp8:{dummy}", "int4", 512, 2)
    folder = tmp_path / "engines" / "tiny-dummy-fp8" / "int4"
    assert manifest.model.recipe.dtype == "fp8"
    weights = load_decoder_weights(manifest.source_folder(folder), "fp8", torch.device("cpu"), rotated=(0,))
    assert isinstance(weights.layers[0].down, Fp8Rows) and weights.norm.dtype is torch.bfloat16
    assert weights.rotated == {0}
    with pytest.raises(NibbleError, match="weights: got fp8 on device cpu, allowed there: float32"):
        Engine.load(folder, EngineLimits(max_context=512, max_running=2, device="cpu"))


def test_a_model_whose_shape_is_not_known_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIBBLE_ENGINES", str(tmp_path))
    shape = resolve_source(load_model_recipe("dummy:llama-8b"))
    assert shape == tmp_path / "llama-8b-dummy" / "source"
    with pytest.raises(NibbleError, match=r"got model 'mistral-7b', whose config.json is not shipped"):
        resolve_source(load_model_recipe("dummy:mistral-7b"))
