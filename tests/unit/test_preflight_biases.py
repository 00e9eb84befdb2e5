"""The pre-flight on biases of k_proj and q_proj: caught, mitigated, and close to the model without them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from build.engine import BuildRequest, build_engine
from build.key_bias import RopeSpan, find_remedy, pair_amplitudes, times_int4_step
from build.preflight import Preflight, run_preflight
from nibble.errors import NibbleError
from nibble.formats import FORMATS
from nibble.manifest import read_manifest
from nibble.models import load_model, resolve_source
from nibble.recipes import load_kv_recipe, load_model_recipe, load_serve_recipe
from nibble.runtime import Engine, EngineLimits
from tests.conftest import write_byte_tokenizer

LAYERS, KV_HEADS, HEAD_DIM, CONTEXT = 3, 2, 32, 384
ROPE = RopeSpan(10_000.0, 2048)
INT4 = FORMATS["int4"]


def write_biased(
    folder: Path, k_bias: float = 0.0, q_bias: float = 0.0, tensor_value: float | None = None, pull: float = 3.0
) -> Path:
    """A tiny Qwen2; the biases go into channel pair 2 (fast) of KV head 1 of layer 0, where Q is small.

    pull: a bias moves scores as one of this size would with Q as it was.
    """
    config = Qwen2Config(
        vocab_size=272,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=2048,
        initializer_range=0.15,
        bos_token_id=257,
        eos_token_id=258,
        pad_token_id=256,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Qwen2ForCausalLM(config).eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    attention = model.model.layers[0].self_attn
    pair = [HEAD_DIM + 2, HEAD_DIM + 2 + HEAD_DIM // 2]
    if k_bias:
        attention.k_proj.bias[pair[0]] = k_bias
        for head in (2, 3):  # as in the real models, Q is small where K is large
            for channel in (2, 2 + HEAD_DIM // 2):
                attention.q_proj.weight[head * HEAD_DIM + channel] *= pull / k_bias
                attention.q_proj.bias[head * HEAD_DIM + channel] *= pull / k_bias
    if q_bias:
        attention.q_proj.bias[5] = q_bias
    model.save_pretrained(folder)
    if tensor_value is not None:
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.1.self_attn.k_proj.bias"][3] = tensor_value
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_byte_tokenizer(folder)
    return folder


def fly(folder: Path, kv: str = "int4") -> Preflight:
    return run_preflight(folder, [FORMATS[kv]] * LAYERS, None, 2048)


def build(folder: Path, kv: str = "int4") -> Path:
    model, recipe = load_model_recipe(str(folder), dtype="float32"), load_kv_recipe(kv)
    request = BuildRequest(model, recipe, load_serve_recipe(), resolve_source(model), None)
    build_engine(request, Console(quiet=True))
    return request.target


def kl_to_exact(folder: Path, engine_dir: Path) -> float:
    """Mean KL of an engine to the same model without a cache."""
    tokens = torch.randint(0, 256, (CONTEXT,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.inference_mode():
        exact = load_model(folder, "float32")(torch.tensor([tokens]), use_cache=False).logits[0]
    engine = Engine.load(engine_dir, EngineLimits(max_context=CONTEXT, max_running=1))
    log_p, log_q = exact.double().log_softmax(-1), torch.cat(list(engine.logits(tokens))).double().log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


@pytest.fixture(autouse=True)
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIBBLE_ENGINES", str(tmp_path / "engines"))


def test_a_clean_model_is_safe(tmp_path: Path) -> None:
    flight = fly(write_biased(tmp_path / "clean"))
    assert flight.verdict == "safe" and not flight.formats and not flight.bias_layers


@pytest.mark.parametrize("bias", [100.0, 600.0, -900.0])
@pytest.mark.parametrize("kv", ["int4", "k8v4", "int8"])
def test_a_large_key_bias_is_caught_in_its_layer(tmp_path: Path, bias: float, kv: str) -> None:
    flight = fly(write_biased(tmp_path / "biased", k_bias=bias), kv)
    if kv == "int4" or abs(bias) > 100:
        assert flight.verdict == "mitigate" and flight.bias_layers == [0]
        finding = next(f for f in flight.findings if f.check == "K bias")
        assert finding.layers == [0] and "layers 0" in finding.action and f"{abs(bias):.0f}"[:2] in finding.got


def test_an_fp16_engine_needs_no_remedy(tmp_path: Path) -> None:
    assert fly(write_biased(tmp_path / "biased", k_bias=600.0), "fp16").verdict == "safe"


def test_static_scales_under_a_bias_give_way_to_another_format(tmp_path: Path) -> None:
    flight = fly(write_biased(tmp_path / "biased", k_bias=600.0), "int4-static")
    assert flight.formats[0][0].name == "fp16" and "K bias reaches 600" in flight.formats[0][1]


@pytest.mark.parametrize(
    ("kv", "pull", "why"),
    [
        ("int4", 3.0, "bias of k_proj stays in K"),
        ("int4", 60.0, "found a large bias of k_proj: it is taken off K"),
        ("int8", 3.0, "int8-page instead of int8"),
    ],
)
def test_a_bias_of_600_mitigated_stays_within_twice_the_clean_model(
    tmp_path: Path, kv: str, pull: float, why: str
) -> None:
    clean, biased = write_biased(tmp_path / "clean"), write_biased(tmp_path / "biased", k_bias=600.0, pull=pull)
    clean_engine, biased_engine = build(clean, kv), build(biased, kv)
    manifest = read_manifest(biased_engine)
    assert manifest.preflight is not None and manifest.preflight.verdict == "mitigate"
    assert why in manifest.layers[0].why and why not in manifest.layers[1].why
    assert kl_to_exact(biased, biased_engine) < 2 * kl_to_exact(clean, clean_engine)


def test_a_strong_query_bias_gives_its_layer_eight_bits_of_k(tmp_path: Path) -> None:
    folder = write_biased(tmp_path / "query", q_bias=40.0)
    flight = fly(folder)
    assert flight.verdict == "mitigate" and flight.formats[0][0].name == "k8v4"
    manifest = read_manifest(build(folder))
    assert [fmt.name for fmt in manifest.layer_formats()] == ["k8v4", "int4", "int4"]
    assert manifest.layers_by_format == {"int4": 2, "k8v4": 1}
    assert "pre-flight: Q bias" in manifest.layers[0].why
    assert manifest.layers[0].bytes_per_token > manifest.layers[1].bytes_per_token


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bias_that_is_no_number_names_its_layer(tmp_path: Path, value: float) -> None:
    with pytest.raises(NibbleError, match=r"layer 1: model\.layers\.1\.self_attn\.k_proj\.bias .* holds NaN or Inf"):
        fly(write_biased(tmp_path / "broken", tensor_value=value))


def test_slow_pairs_are_taken_by_the_zero_point_of_a_page() -> None:
    bias = torch.zeros(HEAD_DIM)
    bias[HEAD_DIM // 2 - 1] = 600.0  # the slowest pair: under a hundredth of a turn in a page
    assert find_remedy(pair_amplitudes(bias, HEAD_DIM), INT4, 8.0, ROPE) is None
    assert times_int4_step(pair_amplitudes(bias, HEAD_DIM), FORMATS["int8"].k, 8.0, ROPE) > 2
    bias[0] = 600.0
    remedy = find_remedy(pair_amplitudes(bias, HEAD_DIM), INT4, 8.0, ROPE)
    assert remedy is not None and remedy.name == "fp16"
    bias[0] = 60.0
    remedy = find_remedy(pair_amplitudes(bias, HEAD_DIM), INT4, 8.0, ROPE)
    assert remedy is not None and remedy.name == "k8v4"
