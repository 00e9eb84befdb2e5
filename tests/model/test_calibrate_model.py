"""SmolLM2: its source is repaired, and ModelOpt's ranges are those of the K and V that reach attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from calibrate.pipeline import CalibrationRequest, calibrate
from calibrate.ranges import ChannelRange
from calibrate.run import SHIPPED_PROMPTS
from nibble.calibration import REPORT_FILE, SCALES_FILE, read_calibration
from nibble.models import load_model, load_tokenizer, read_shape
from nibble.recipes import load_model_recipe

pytestmark = pytest.mark.model


def request_for(out: Path) -> CalibrationRequest:
    recipe = load_model_recipe("smollm2-135m")
    return CalibrationRequest(recipe, str(SHIPPED_PROMPTS), count=6, seed=0, max_tokens=96, out=out)


@pytest.fixture(scope="module")
def finished(smollm2_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("calibration")
    calibrate(request_for(out))
    return out


def test_the_tokenizer_ends_turns_as_the_model_does(smollm2_source: Path) -> None:
    tokenizer = load_tokenizer(smollm2_source)
    config = json.loads((smollm2_source / "config.json").read_text(encoding="utf-8"))
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id == config["eos_token_id"] == 2
    assert "quantization_config" not in config
    assert config["dtype"] == "float32"
    turn = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer.encode("one , two .")) == "one , two ."


def test_the_converted_model_answers(smollm2_source: Path) -> None:
    model, tokenizer = load_model(smollm2_source, "float32"), load_tokenizer(smollm2_source)
    turn = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_every_layer_has_finite_living_channels(finished: Path) -> None:
    calibration, shape = read_calibration(finished), read_shape(request_source(finished))
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (30, 3, 64)
    for layer in range(30):
        for tensor in "kv":
            low, high = calibration.channel_range(layer, tensor)
            assert low.shape == high.shape == (3, 64)
            assert torch.isfinite(low).all() and torch.isfinite(high).all() and (low < high).all()


def request_source(finished: Path) -> Path:
    from nibble.models import resolve_source

    return resolve_source(request_for(finished).recipe)


def test_the_same_seed_gives_the_same_bytes(finished: Path, tmp_path: Path) -> None:
    calibrate(request_for(tmp_path))
    for name in (SCALES_FILE, REPORT_FILE):
        assert (tmp_path / name).read_bytes() == (finished / name).read_bytes()


def test_ranges_are_exactly_what_reaches_the_attention_function(
    finished: Path, smollm2_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from calibrate.prompt_set import encode_prompts, load_prompt_set

    seen: dict[tuple[int, str], ChannelRange] = {}
    original = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def spy(module: nn.Module, query: Any, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for tensor, values in (("k", key), ("v", value)):
            place, new = (int(module.layer_idx), tensor), ChannelRange.of(values)  # type: ignore[arg-type]
            seen[place] = seen[place].union(new) if place in seen else new
        return original(module, query, key, value, *args, **kwargs)

    request = request_for(finished)
    prompts = load_prompt_set(request.prompts).draw(request.count, request.seed)
    model = load_model(smollm2_source, "float32")
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", spy)
    with torch.inference_mode():
        for ids in encode_prompts(prompts, load_tokenizer(smollm2_source), request.max_tokens):
            model.base_model(input_ids=torch.tensor([ids]), use_cache=False)
    calibration = read_calibration(finished)
    for (layer, tensor), channels in seen.items():
        low, high = calibration.channel_range(layer, tensor)
        assert torch.equal(low, channels.minimum) and torch.equal(high, channels.maximum)
    assert len(seen) == 60
