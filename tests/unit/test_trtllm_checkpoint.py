"""Checkpoints for TensorRT-LLM: ranks put together again are the model, element for element; bad scales are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from build.trtllm.checkpoint import expected_tensors, rank_tensors, write_checkpoint
from build.trtllm.engine import layer_scales
from build.trtllm.hf_export import export_hugging_face
from build.trtllm.layout import Parallelism
from build.trtllm.levels import levels_table, measure_levels, require_levels
from build.trtllm.model_config import checkpoint_config
from build.trtllm.plan import make_plan
from build.trtllm.recipes import load_host_recipe
from build.trtllm.schema import check_config, tensor_rules
from build.trtllm.source import SourceTensors
from nibble.calibration import Calibration
from nibble.errors import NibbleError
from nibble.recipes import load_model_recipe, load_serve_recipe

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
LAYERS, HEADS, KV_HEADS, SIZE, HIDDEN, INTERMEDIATE, VOCAB = 3, 4, 2, 16, 32, 48, 67


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny seeded model of each family; Mistral's embeddings are tied."""
    root = tmp_path_factory.mktemp("families")
    for seed, family in enumerate(FAMILIES):
        (root / family).mkdir()
        save_file(tiny_weights(family, seed), root / family / "model.safetensors")
        (root / family / "config.json").write_text(json.dumps(tiny_config(family)))
    return {family: root / family for family in FAMILIES}


def tiny_config(family: str) -> dict[str, Any]:
    return {
        "model_type": family, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": SIZE, "intermediate_size": INTERMEDIATE, "vocab_size": VOCAB,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "tie_word_embeddings": family == "mistral",
    }  # fmt: skip


def tiny_weights(family: str, seed: int) -> dict[str, torch.Tensor]:
    """Random weights under transformers' names, from the recorded rules: what a rank of one GPU would hold."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    rows = {"q_proj": HEADS * SIZE, "k_proj": KV_HEADS * SIZE, "v_proj": KV_HEADS * SIZE}
    weights = {"model.embed_tokens.weight": draw(VOCAB, HIDDEN), "model.norm.weight": draw(HIDDEN)}
    if family != "mistral":
        weights["lm_head.weight"] = draw(VOCAB, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name, count in rows.items():
            weights[f"{prefix}self_attn.{name}.weight"] = draw(count, HIDDEN)
            if family == "qwen2":
                weights[f"{prefix}self_attn.{name}.bias"] = draw(count)
        if family == "qwen3":
            weights |= {f"{prefix}self_attn.{name}.weight": draw(SIZE) for name in ("q_norm", "k_norm")}
        weights[f"{prefix}self_attn.o_proj.weight"] = draw(HIDDEN, HEADS * SIZE)
        weights |= {f"{prefix}mlp.{name}.weight": draw(INTERMEDIATE, HIDDEN) for name in ("gate_proj", "up_proj")}
        weights[f"{prefix}mlp.down_proj.weight"] = draw(HIDDEN, INTERMEDIATE)
        weights |= {f"{prefix}{name}.weight": draw(HIDDEN) for name in ("input_layernorm", "post_attention_layernorm")}
    return weights


def reassemble(ranks: list[dict[str, torch.Tensor]], parallel: Parallelism, family: str) -> dict[str, torch.Tensor]:
    """Transformers' tensors from the files of all ranks; repeated KV heads must agree."""
    found = {}
    first, last = ranks[: parallel.tensor], ranks[-parallel.tensor :]
    for rank in first:
        found["model.embed_tokens.weight"] = rank["transformer.vocab_embedding.weight"]
    found["model.norm.weight"] = last[0]["transformer.ln_f.weight"]
    head = torch.cat([rank["lm_head.weight"] for rank in last])
    assert not head[VOCAB:].any()
    found["model.embed_tokens.weight" if family == "mistral" else "lm_head.weight"] = head[:VOCAB]
    for layer in range(LAYERS):
        stage = next(s for s in range(parallel.pipeline) if layer in parallel.layers(s * parallel.tensor, LAYERS))
        members = ranks[stage * parallel.tensor : (stage + 1) * parallel.tensor]
        place = layer - parallel.layers(stage * parallel.tensor, LAYERS).start
        for rule in tensor_rules("layer"):
            name = f"transformer.layers.{place}.{rule.name}"
            if rule.hf and name in members[0]:
                parts = [member[name] for member in members]
                found |= {
                    f"model.layers.{layer}.{hf}": x for hf, x in zip(rule.hf, joined(rule.split, parts), strict=True)
                }
    return found


def joined(split: str, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    if split == "none":
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[:1]
    if split in ("rows", "columns"):
        return [torch.cat(parts, dim=0 if split == "rows" else 1)]
    q_rows, kv_rows = HEADS * SIZE // len(parts), max(KV_HEADS // len(parts), 1) * SIZE
    q, k, v = zip(*(part.split((q_rows, kv_rows, kv_rows)) for part in parts), strict=True)
    repeats = max(len(parts) // KV_HEADS, 1)
    for heads in (k, v):
        assert all(torch.equal(heads[i], heads[i - i % repeats]) for i in range(len(parts)))
    return [torch.cat(q), torch.cat(k[::repeats]), torch.cat(v[::repeats])]


@pytest.mark.parametrize("parallel", [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 3)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_put_together_are_the_model(
    folders: dict[str, Path], tmp_path: Path, family: str, parallel: tuple[int, int]
) -> None:
    cut = Parallelism(*parallel)
    config = checkpoint_config(tiny_config(family), "int8", "auto", cut)
    scales = {layer: torch.tensor([0.01 * (layer + 1)]) for layer in range(LAYERS)}
    with SourceTensors(folders[family]) as source:
        write_checkpoint(tmp_path, source, config, cut, scales)
    ranks = [load_file(tmp_path / f"rank{rank}.safetensors") for rank in range(cut.world_size)]
    weights = load_file(folders[family] / "model.safetensors")
    found = reassemble(ranks, cut, family)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert json.loads((tmp_path / "config.json").read_text()) == config


def test_scales_are_those_of_the_layers_of_each_stage(folders: dict[str, Path]) -> None:
    cut = Parallelism(tensor=2, pipeline=2)
    config = checkpoint_config(tiny_config("llama"), "fp8", "auto", cut)
    scales = {layer: torch.tensor([0.5 + layer]) for layer in range(LAYERS)}
    with SourceTensors(folders["llama"]) as source:
        for rank, layers in enumerate([(0, 1), (0, 1), (2,), (2,)]):
            tensors = rank_tensors(source, config, cut, rank, scales)
            found = [float(x) for name, x in sorted(tensors.items()) if name.endswith("kv_cache_scaling_factor")]
            assert found == [0.5 + layer for layer in layers]
            assert {name: (tuple(x.shape), str(x.dtype)[6:]) for name, x in tensors.items()} == expected_tensors(
                config, cut, rank
            )


@pytest.mark.parametrize("bad", [None, torch.tensor([float("nan")]), torch.tensor([1.0]), torch.tensor([0.0])], ids=str)
def test_a_bad_scale_is_refused_by_its_layer(
    folders: dict[str, Path], tmp_path: Path, bad: torch.Tensor | None
) -> None:
    config = checkpoint_config(tiny_config("llama"), "int8", "auto", Parallelism())
    scales = {0: torch.tensor([0.1]), 2: torch.tensor([0.1])} | ({} if bad is None else {1: bad})
    with (
        SourceTensors(folders["llama"]) as source,
        pytest.raises(NibbleError, match=r"KV scale of layer 1: .*make calibrate"),
    ):
        write_checkpoint(tmp_path, source, config, Parallelism(), scales)
    assert list(tmp_path.iterdir()) == []


def calibration(low: float = -3.0, high: float = 5.0) -> Calibration:
    """K reaches 5 in layer 0, one more in each further layer; V is far smaller."""
    tensors = {}
    for layer in range(LAYERS):
        for tensor, size in (("k", 1.0), ("v", 0.1)):
            tensors[f"layers.{layer}.{tensor}.min"] = torch.full((KV_HEADS, SIZE), low * size)
            tensors[f"layers.{layer}.{tensor}.max"] = torch.full((KV_HEADS, SIZE), (high + layer) * size)
    return Calibration(Path("calibration"), {"kv_scales_sha256": "0"}, tensors)


@pytest.mark.parametrize(("kv", "largest"), [("int8", 127), ("fp8", 448)])
def test_scales_come_from_k_and_v_alone(kv: str, largest: int) -> None:
    plan = make_plan(
        load_model_recipe("llama-8b"), load_host_recipe(kv), tiny_config("llama"), Parallelism(), load_serve_recipe()
    )
    scales = layer_scales(calibration(), plan)
    assert [float(scale) for scale in scales.values()] == pytest.approx(
        [(5 + layer) / largest for layer in range(LAYERS)]
    )
    assert all(scale.dtype == torch.float32 and scale.shape == (1,) for scale in scales.values())
    with pytest.raises(NibbleError, match=re.escape("layer 1 K: got scale 1")):
        layer_scales(calibration(high=largest - 1.0), plan)


def test_layers_that_one_scale_leaves_no_codes() -> None:
    scales = {layer: torch.tensor([2.0]) for layer in range(LAYERS)}
    levels = measure_levels(calibration(), scales)
    assert [round(found.k, 3) for found in levels] == [round((5 + layer) / 2.0, 3) for layer in range(LAYERS)]
    assert levels_table(levels).row_count == LAYERS
    with pytest.raises(
        NibbleError, match=r"in layers 0, 1, 2 the usual channel of K would reach 2.5 of 127 codes \(layer 0\)"
    ):
        require_levels(levels)
    require_levels(measure_levels(calibration(), {layer: torch.tensor([0.05]) for layer in range(LAYERS)}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma3"}, "got a model of type 'gemma3', allowed llama, mistral, qwen2, qwen3"),
        ({"attention_bias": True}, "config.json has attention_bias"),
        ({"sliding_window": 4096}, "sliding window of 4096 tokens"),
        ({"rope_parameters": {"rope_type": "default"}}, "no rope_theta"),
        ({"rope_parameters": {"rope_type": "ntk", "rope_theta": 1e4}}, "rotary_scaling: got type 'ntk'"),
    ],
)
def test_models_that_have_no_checkpoint(change: dict[str, Any], message: str) -> None:
    with pytest.raises(NibbleError, match=re.escape(message)):
        checkpoint_config({**tiny_config("llama"), **change}, "int8", "auto", Parallelism())


def test_config_is_checked_against_the_recorded_keys() -> None:
    good = checkpoint_config(tiny_config("qwen2"), "int8", "auto", Parallelism(2))
    assert good["rotary_base"] == 5e5 and good["rotary_scaling"] is None and good["attn_bias"]
    for change, message in (
        ({"rotary_base": "big"}, "key rotary_base: got 'big', allowed float"),
        (
            {"quantization": {**good["quantization"], "kv_cache_quant_algo": "INT4"}},
            "got 'INT4', allowed None, INT8, FP8",
        ),
        ({"architecture": "GPT"}, "key architecture: got 'GPT'"),
    ):
        with pytest.raises(NibbleError, match=re.escape(message)):
            check_config({**good, **change})
    with pytest.raises(NibbleError, match="missing key head_size"):
        check_config({key: value for key, value in good.items() if key != "head_size"})


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (Parallelism(tensor=3), "4 query heads over 3 ranks"),
        (Parallelism(pipeline=4), "got 4 stages, allowed 1 to 3"),
    ],
)
def test_what_ranks_can_not_share(folders: dict[str, Path], parallel: Parallelism, message: str) -> None:
    config = checkpoint_config(tiny_config("llama"), "fp16", "auto", parallel)
    with SourceTensors(folders["llama"]) as source, pytest.raises(NibbleError, match=message):
        rank_tensors(source, config, parallel, 0, {})


def test_export_to_hugging_face_holds_scales_beside_the_linked_weights(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = export_hugging_face(tmp_path / "fp8", folders["llama"], calibration())
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = {name: tensor for file in set(places.values()) for name, tensor in load_file(folder / file).items()}
    assert tensors.keys() == places.keys()
    weights = load_file(folders["llama"] / "model.safetensors")
    assert all(torch.equal(tensors[name], weights[name]) for name in weights)
    scale = tensors["model.layers.2.self_attn.k_proj.k_scale"]
    assert scale.shape == () and scale.dtype == torch.float32 and float(scale) == pytest.approx(7 / 448)
    assert float(tensors["model.layers.0.self_attn.v_proj.v_scale"]) == pytest.approx(0.5 / 448)
    assert json.loads((folder / "hf_quant_config.json").read_text())["quantization"] == {
        "quant_algo": None,
        "kv_cache_quant_algo": "FP8",
    }
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"] == {"dynamic": False, "num_bits": 8, "type": "float"}
    assert config["quant_method"] == "modelopt"
