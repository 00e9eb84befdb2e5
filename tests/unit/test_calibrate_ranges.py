"""ModelOpt's quantizers see exactly the K and V that reach attention, and no bad value gets through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from calibrate.ranges import ChannelRange, check_alive, check_finite, silenced_by_norm
from nibble.errors import NibbleError
from nibble.models import load_model

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
}
FAMILIES = [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Gemma3TextConfig]
PROMPTS = [list(range(3, 40)), [5, 9], list(range(60, 0, -1))]


def tiny_model(config: type[PretrainedConfig] = LlamaConfig) -> PreTrainedModel:
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config(**SIZES)).eval()


def collect(model: nn.Module, prompts: list[list[int]] = PROMPTS) -> dict[tuple[int, str], ChannelRange]:
    from calibrate.collector import RangeCollector, collect_ranges

    found: dict[tuple[int, str], ChannelRange] = {}

    def loop(collector: RangeCollector) -> None:
        for prompt in prompts:
            collector.run(prompt)
        found.update(collector.ranges())

    collect_ranges(model, 2, loop)
    return found


@torch.no_grad()
def cached_ranges(model: PreTrainedModel) -> dict[tuple[int, str], ChannelRange]:
    """The same ranges from what transformers writes into its cache: K after RoPE, V, heads not repeated."""
    ranges: dict[tuple[int, str], ChannelRange] = {}
    for prompt in PROMPTS:
        cache = DynamicCache()
        model(input_ids=torch.tensor([prompt]), past_key_values=cache, use_cache=True)
        for layer, entry in enumerate(cache.layers):
            for tensor, values in (("k", entry.keys), ("v", entry.values)):
                new = ChannelRange.of(values)
                ranges[layer, tensor] = ranges[layer, tensor].union(new) if (layer, tensor) in ranges else new
    return ranges


@pytest.mark.parametrize("config", FAMILIES)
def test_ranges_are_those_of_the_cache(config: type[PretrainedConfig]) -> None:
    expected, found = cached_ranges(tiny_model(config)), collect(tiny_model(config))
    assert set(found) == {(layer, tensor) for layer in range(2) for tensor in "kv"}
    for key, channels in found.items():
        torch.testing.assert_close(channels.minimum, expected[key].minimum, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(channels.maximum, expected[key].maximum, rtol=1e-5, atol=1e-6)
        assert channels.minimum.shape == (2, 16)


def test_ranges_are_exactly_what_reaches_the_attention_function(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    seen: dict[tuple[int, str], ChannelRange] = {}
    original = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def spy(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kw: Any
    ) -> Any:
        for tensor, values in (("k", key), ("v", value)):
            place = (int(module.layer_idx), tensor)  # type: ignore[arg-type]
            new = ChannelRange.of(values)
            seen[place] = seen[place].union(new) if place in seen else new
        return original(module, query, key, value, *args, **kw)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", spy)
    found = collect(tiny_model())
    assert set(seen) == set(found)
    for key, channels in found.items():
        assert torch.equal(channels.minimum, seen[key].minimum)
        assert torch.equal(channels.maximum, seen[key].maximum)


def test_the_midrange_is_modelopts_affine_bias() -> None:
    import modelopt.torch.quantization as mtq

    affine = {"num_bits": 8, "axis": (1, 3), "bias": {-2: None, -4: None, "type": "static", "method": "max_min"}}
    model = tiny_model()
    config = {
        "quant_cfg": [
            {"quantizer_name": "*", "enable": False},
            {"quantizer_name": "*[kv]_bmm_quantizer", "cfg": affine},
        ],
        "algorithm": "max",
    }
    with torch.inference_mode():
        mtq.quantize(model, config, lambda m: [m(torch.tensor([prompt]), use_cache=False) for prompt in PROMPTS])
    for (layer, tensor), channels in collect(tiny_model()).items():
        bias = getattr(model.model.layers[layer].self_attn, f"{tensor}_bmm_quantizer")._bias_value
        torch.testing.assert_close(bias[0, :, 0], (channels.minimum + channels.maximum) / 2)


def test_order_and_repetition_change_nothing() -> None:
    first, second = collect(tiny_model()), collect(tiny_model(), [*reversed(PROMPTS), PROMPTS[0]])
    assert all(torch.equal(first[key].minimum, second[key].minimum) for key in first)
    assert all(torch.equal(first[key].maximum, second[key].maximum) for key in first)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_name_layer_head_and_channel(bad: float) -> None:
    model = tiny_model(Qwen2Config)
    model.model.layers[1].self_attn.v_proj.bias.data[16 + 5] = bad  # head 1, channel 5
    with pytest.raises(NibbleError, match=rf"layer 1 V, head 1, channel 5: got {bad}, allowed finite"):
        collect(model)


def test_a_dead_channel_names_layer_head_and_channel() -> None:
    model = tiny_model()
    model.model.layers[0].self_attn.v_proj.weight.data[3] = 0.0
    with pytest.raises(
        NibbleError, match="layer 0 V, head 0, channel 3: dead channel, every token gives 0; 1 channels"
    ):
        check_alive(collect(model)[0, "v"], "layer 0 V")


def test_a_channel_that_the_norm_of_k_silences_is_no_error() -> None:
    model = tiny_model(Qwen3Config)
    norm = model.model.layers[0].self_attn.k_norm
    half = norm.weight.shape[0] // 2
    norm.weight.data[[3, 3 + half]] = 0.0  # both of a pair, or RoPE would mix the other into it
    channels = collect(model)[0, "k"]
    check_alive(channels, "layer 0 K", silenced_by_norm(model.model.layers[0].self_attn))
    with pytest.raises(NibbleError, match="layer 0 K, head 0, channel 3: dead channel"):
        check_alive(channels, "layer 0 K")
    assert silenced_by_norm(tiny_model().model.layers[0].self_attn) is None


def test_infinite_minimum_is_found_too() -> None:
    channels = ChannelRange(torch.tensor([[0.0, -float("inf")]]), torch.ones(1, 2))
    with pytest.raises(NibbleError, match="layer 7 K, head 0, channel 1"):
        check_finite(channels, "layer 7 K")


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(NibbleError, match=r"layer 0: no attention whose K can be reached in Sequential \(4 of 4"):
        collect(nn.Sequential(nn.Linear(2, 2)))


def test_attention_that_is_never_called_is_named() -> None:
    with pytest.raises(NibbleError, match="layer 0 K: attention was never called"):
        collect(tiny_model(), prompts=[])


def test_the_shared_tiny_model_has_no_dead_channel(tiny_llama_dir: Path) -> None:
    for (layer, tensor), channels in collect(load_model(tiny_llama_dir)).items():
        check_alive(channels, f"{layer} {tensor}")
