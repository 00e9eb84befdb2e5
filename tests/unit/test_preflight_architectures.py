"""The pre-flight on config.json and weights: sliding windows pass, MLA and shared KV are refused by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from build import run as build_run
from build.preflight import preflight_table, require_flyable, run_preflight
from nibble.architecture import find_refusal, read_architecture
from nibble.calibration import Calibration
from nibble.errors import NibbleError
from nibble.formats import FORMATS
from nibble.models import read_config, resolve_source
from nibble.recipes import load_model_recipe
from nibble.stage import console, run_stage

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "max_position_embeddings": 4096,
}
INT4 = [FORMATS["int4"]] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "deepseek_v3", "kv_lora_rank": 512},
            r"latent attention \(MLA\): .*kv_lora_rank 512",
        ),
        ({"model_type": "minicpm3", "kv_lora_rank": 256}, r"MLA.*Serve it with an engine made for MLA"),
        ({"num_kv_shared_layers": 10}, "KV-shared layers: num_kv_shared_layers 10"),
        ({"use_cla": True, "cla_share_factor": 2}, "KV-shared layers: cross-layer attention, cla_share_factor 2"),
        ({"attn_logit_softcapping": 50.0}, "soft-capped attention scores: attn_logit_softcapping 50.0"),
        ({"model_type": "gpt_oss"}, "attention sinks in the weights"),
        (
            {"rope_scaling": {"rope_type": "longrope"}},
            "RoPE of type 'longrope'.*allowed: default, linear, llama3, yarn",
        ),
        ({"head_dim": 40}, "head size 40: allowed multiples of 16 from 16 to 256"),
        ({"num_key_value_heads": 3}, "8 query heads over 3 KV heads: allowed a whole multiple"),
    ],
)
def test_refusals_name_what_is_in_the_way(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}), encoding="utf-8")
    flight = run_preflight(tmp_path, INT4, None, 2048)
    assert flight.verdict == "refuse"
    with pytest.raises(NibbleError, match=f"pre-flight refuses deep: architecture: .*{message}"):
        require_flyable(flight, "deep")
    with pytest.raises(NibbleError, match=message):  # before anything is fetched or loaded
        resolve_source(load_model_recipe(str(tmp_path)))


def test_the_command_line_refuses_mla_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**LLAMA, "model_type": "deepseek_v3", "kv_lora_rank": 512}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["build.run", "--model", str(tmp_path), "--kv", "int4"])
    with pytest.raises(SystemExit) as ended:
        run_stage(build_run.main)
    assert ended.value.code == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "multi-head latent attention (MLA)" in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (None,) * 4),
        ({"sliding_window": 1024}, (1024,) * 4),
        ({"sliding_window": 1024, "use_sliding_window": False}, (None,) * 4),
        (
            {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 2},
            (512, None, 512, None),
        ),
    ],
)
def test_windows_of_each_layer(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    config = {**LLAMA, **changes}
    assert find_refusal(config) is None
    assert read_architecture(config).windows == windows


def test_facts_of_a_config() -> None:
    architecture = read_architecture({**LLAMA, "rope_scaling": {"rope_type": "llama3"}, "rope_theta": 5e5})
    assert (architecture.head_dim, architecture.group, architecture.rope_kind) == (64, 4, "llama3")
    assert architecture.rope_theta == 5e5


def test_a_plain_model_is_safe_and_every_check_is_shown(tiny_llama_dir: Path) -> None:
    flight = run_preflight(tiny_llama_dir, INT4, None, 2048)
    assert flight.verdict == "safe"
    checks = {finding.check for finding in flight.findings}
    assert checks >= {"head size", "GQA group", "RoPE", "sliding window", "QK-norm", "K bias", "Q bias"}
    with console.capture() as shown:
        console.print(preflight_table(flight, "tiny"))
    assert "Pre-flight of tiny: safe" in shown.get() and "QK-norm" in shown.get()


def test_learned_sinks_in_the_weights_are_refused(tmp_path: Path, make_tiny_llama: Callable[..., None]) -> None:
    make_tiny_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.sinks"] = torch.zeros(4)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    flight = run_preflight(tmp_path, INT4, None, 2048)
    with pytest.raises(NibbleError, match=r"attention sinks: learned attention sinks are not supported"):
        require_flyable(flight, "tiny")


def test_damaged_weights_are_named(tmp_path: Path, make_tiny_llama: Callable[..., None]) -> None:
    make_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(NibbleError, match=r"model\.safetensors: can't be read"):
        run_preflight(tmp_path, INT4, None, 2048)


def calibration(k_max: float) -> Calibration:
    tensors = {}
    for layer in range(2):
        low, high = torch.full((2, 32), -1.0), torch.full((2, 32), 1.0)
        if layer == 1:
            high[1, 3] = k_max
        tensors |= {f"layers.{layer}.k.min": low, f"layers.{layer}.k.max": high}
    return Calibration(Path("calibration"), {}, tensors)


def test_calibrated_ranges_beyond_fp16_are_refused_and_wide_ones_shown(tiny_llama_dir: Path) -> None:
    wide = run_preflight(tiny_llama_dir, INT4, calibration(99.0), 2048)
    finding = next(f for f in wide.findings if f.check == "K channel ranges")
    assert finding.verdict == "safe" and finding.got == "widest 50 times the median (layer 1)"
    beyond = run_preflight(tiny_llama_dir, INT4, calibration(1e5), 2048)
    with pytest.raises(NibbleError, match=r"K is beyond what fp16 pages hold \(65504\) in layers 1"):
        require_flyable(beyond, "tiny")


@pytest.mark.parametrize(
    ("kv", "action"), [("int8", "int8-page in layers 1"), ("int4", "each channel has a scale of its own")]
)
def test_a_wide_channel_is_no_match_for_the_scale_of_a_token(tiny_llama_dir: Path, kv: str, action: str) -> None:
    flight = run_preflight(tiny_llama_dir, [FORMATS[kv]] * 2, calibration(99.0), 2048)
    assert next(f for f in flight.findings if f.check == "K channel ranges").action == action
    assert [fmt.name for fmt, _ in flight.formats.values()] == ["int8-page"] * (kv == "int8")
    assert not run_preflight(tiny_llama_dir, [FORMATS[kv]] * 2, calibration(9.0), 2048).formats


def test_no_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(NibbleError, match=r"no config\.json in it"):
        read_config(tmp_path)


def test_a_rope_for_each_kind_of_layer_is_read_and_checked() -> None:
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6},
    }
    found = read_architecture({**LLAMA, "rope_parameters": ropes})
    assert (found.rope_kind, found.rope_theta) == ("linear", 1e6)
    assert find_refusal({**LLAMA, "rope_parameters": ropes}) is None
    ropes["sliding_attention"]["rope_type"] = "dynamic"
    assert "RoPE of type 'dynamic'" in (find_refusal({**LLAMA, "rope_parameters": ropes}) or "")
