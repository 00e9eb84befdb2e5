"""The model repository: config.pbtxt parses back, holds what the model needs, and bad ones are refused."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from google.protobuf import text_format

from nibble.errors import NibbleError
from nibble.paths import REPOSITORY_ROOT
from serve import settings as settings_module
from serve.repository import check_config, model_config, write_repository
from serve.settings import EngineOptions, ServeSettings
from serve.tensors import INPUTS, OUTPUTS


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServeSettings:
    monkeypatch.setattr(settings_module, "RUN_ROOT", tmp_path / "run")
    options = EngineOptions(max_context=512, kv_fallback="fp16")
    return ServeSettings("tiny-int4", tmp_path / "engine", http_port=9000, options=options)


def test_config_round_trip(settings: ServeSettings) -> None:
    config = model_config(settings)
    assert check_config(text_format.MessageToString(config)) == config


def test_parameters_reach_the_model(settings: ServeSettings) -> None:
    parameters = {key: value.string_value for key, value in model_config(settings).parameters.items()}
    assert parameters["repository_root"] == str(REPOSITORY_ROOT)
    assert parameters["engine_dir"] == str(settings.engine_dir)
    assert (parameters["max_context"], parameters["kv_fallback"]) == ("512", "fp16")
    assert "threads" not in parameters, "None must be left out, it is not a number"


def test_tensor_names_of_the_trtllm_ensemble() -> None:
    ensemble_inputs = {"text_input", "max_tokens", "temperature", "top_p", "top_k", "stop_words", "seed", "stream"}
    assert ensemble_inputs <= INPUTS.keys()
    assert {"text_output", "output_log_probs", "finish_reason"} <= OUTPUTS.keys()


BAD_EDITS = [
    ('backend: "python"', 'backend: "onnx"', "backend: got 'onnx'"),
    ("max_batch_size: 1", "max_batch_size: -1", "max_batch_size: got -1"),
    ("decoupled: true", "decoupled: false", "decoupled must be true"),
    ("count: 1", "count: 2", r"instance_group: got counts \[2\]"),
    ('name: "llm"', 'name: "other"', "name: got 'other'"),
    ('name: "text_input"', 'name: "prompt"', "input: got"),
    ('key: "engine_dir"', 'key: "engine"', "parameters: engine_dir is missing"),
    ("max_batch_size: 1", "max_batch_sise: 1", r"\d+:\d+ .*max_batch_sise"),
    ("max_batch_size: 1", 'max_batch_size: "one"', r"\d+:\d+"),
]


@pytest.mark.parametrize(("old", "new", "message"), BAD_EDITS)
def test_bad_config(settings: ServeSettings, old: str, new: str, message: str) -> None:
    text = text_format.MessageToString(model_config(settings))
    assert old in text
    with pytest.raises(NibbleError, match=message):
        check_config(text.replace(old, new, 1))


def test_repository_is_written_over_an_older_one(settings: ServeSettings) -> None:
    stale = settings.models_dir / "llm" / "2" / "model.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    write_repository(settings)
    written = {str(path.relative_to(settings.models_dir)) for path in settings.models_dir.rglob("*") if path.is_file()}
    assert written == {"llm/config.pbtxt", "llm/1/model.py"}
    check_config((settings.models_dir / "llm" / "config.pbtxt").read_text())


def test_model_file_imports_nothing_of_ours_before_the_path_is_set() -> None:
    """Triton's stub ignores PYTHONPATH: an import at the top of model.py would fail in it."""
    tree = ast.parse((REPOSITORY_ROOT / "triton_repo" / "native" / "1" / "model.py").read_text())
    imported = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    imported += [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    assert not [name for name in imported if name and name.split(".")[0] in ("nibble", "serve")]
