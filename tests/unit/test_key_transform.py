"""K stored in another basis, or less its bias: the same scores, fewer of them spoilt by rounding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from build.key_basis import refuse_basis
from calibrate.key_moments import LayerMoments, balance_keys
from nibble.balance import BasisChange, balanced_rotation
from nibble.errors import NibbleError
from nibble.formats import FORMATS, ScaleKind, TensorFormat
from nibble.key_transform import KEYS_FILE, KeyBias, KeyTransform, read_key_transforms, write_key_transforms
from nibble.quantizer import round_trip
from nibble.reference import reference_attention
from nibble.runtime import Engine, EngineLimits
from nibble.runtime.cache import CacheSpec
from nibble.visibility import PagePolicy
from tests.unit.runtime_cases import LetterTokenizer, make_model, make_spec, random_prompt

HEADS, CHANNELS = 2, 32


def random_moments(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Covariances with channels of very different size, as real K and Q have."""
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randn(2, HEADS, 200, CHANNELS, generator=generator)
    sizes = torch.logspace(-1, 1, CHANNELS)
    k, q = factors[0] * sizes, factors[1] * sizes.flip(0)[torch.randperm(CHANNELS, generator=generator)]
    return k.mT @ k / 200, q.mT @ q / 200


def test_balancing_keeps_scores_and_makes_all_channels_alike() -> None:
    k, q = random_moments()
    basis = balanced_rotation(k, q, ridge=0.0)
    identity = torch.eye(CHANNELS).expand(HEADS, -1, -1)
    torch.testing.assert_close(basis.reader.mT @ basis.forward, identity, rtol=0, atol=1e-4)
    for moment, change in ((k, basis.forward), (q, basis.reader)):
        spread = (change @ moment @ change.mT).diagonal(dim1=-2, dim2=-1)
        assert (spread.amax(-1) / spread.amin(-1)).max() < 1.01


def test_a_channel_may_be_scaled_up_if_its_reader_is_scaled_down() -> None:
    k, q = random_moments()
    factor = torch.ones(CHANNELS)
    factor[3] = 200.0
    scaled = balanced_rotation(k * factor * factor[:, None], q / factor / factor[:, None])
    plain = balanced_rotation(k, q)
    size = (plain.forward / factor).abs().amax()
    flip = (scaled.forward / (plain.forward / factor)).sign()  # eigenvectors have no sign
    assert (scaled.forward * flip - plain.forward / factor).abs().max() / size < 0.02 or flip.abs().min() == 1


def test_balanced_keys_lose_less_to_four_bits() -> None:
    k, q = random_moments()
    basis = balanced_rotation(k, q)
    root_k, root_q = (torch.linalg.cholesky(m + 1e-6 * torch.eye(CHANNELS)) for m in (k, q))
    generator = torch.Generator().manual_seed(5)
    keys = torch.randn(HEADS, 64, CHANNELS, generator=generator) @ root_k.mT
    queries = torch.randn(HEADS, 256, CHANNELS, generator=generator) @ root_q.mT
    four_bits = TensorFormat(4, ScaleKind.PAGE_CHANNEL)

    def error(q: torch.Tensor, k: torch.Tensor) -> float:
        return (q @ (round_trip(k.half(), four_bits) - k).mT).square().mean().item()

    assert error(queries @ basis.reader.mT, keys @ basis.forward.mT) < 0.7 * error(queries, keys)


@pytest.mark.parametrize("dead_in", ["k", "q", "k and q"])
def test_dead_channels_leave_a_basis_that_fp16_can_hold(dead_in: str) -> None:
    generator = torch.Generator().manual_seed(4)
    keys, queries = torch.randn(2, HEADS, 300, CHANNELS, generator=generator) * torch.logspace(-1, 1, CHANNELS)
    dead = torch.tensor([3, 6, 19, 22])  # both of two RoPE pairs, as where Gemma's norms have a weight of 0
    for name, x in (("k", keys), ("q", queries)):
        if name in dead_in.split(" and "):
            x[..., dead] = 0.0
    basis = balanced_rotation(keys.mT @ keys, queries.mT @ queries)
    stored, read, want = keys @ basis.forward.mT, queries @ basis.reader.mT, queries @ keys.mT
    assert max(stored.abs().max(), read.abs().max()) < 1e3 * max(keys.abs().max(), queries.abs().max())
    assert relative(read @ stored.mT, want) < 1e-5
    assert relative(read.half().float() @ stored.half().float().mT, want) < 1e-3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_moments_that_say_nothing_are_refused(bad: float) -> None:
    k, q = random_moments()
    k[1] = bad
    with pytest.raises(NibbleError, match=r"head 1.*calibrate with more prompts"):
        balanced_rotation(k, q)


def transforms_of(family: str, size: float = 1.0) -> tuple[dict[int, KeyTransform], torch.Tensor | None]:
    """Transforms of both layers from the model's own moments; layer 0's bias when it has one."""
    model = biased_model(family, size)
    bases = balance_keys(model, torch.stack([torch.tensor(random_prompt(300, seed)) for seed in (7, 8)]), 1024)
    found = {layer: KeyTransform(basis) for layer, basis in enumerate(bases)}
    bias = model.model.layers[0].self_attn.k_proj.bias
    if bias is not None:
        rotary = model.model.rotary_emb
        key_bias = KeyBias(bias.view(HEADS, -1), rotary.inv_freq, rotary.attention_scaling)
        found[0] = KeyTransform(bases[0], key_bias)
    return found, bias


def biased_model(family: str, size: float):  # type: ignore[no-untyped-def]
    model = make_model(family)
    if size != 1.0:
        attention = model.model.layers[0].self_attn
        attention.k_proj.bias.mul_(size)
        attention.q_proj.weight.div_(size)
        attention.q_proj.bias.div_(size)
    return model


def logits(kv: str, family: str, transforms: dict[int, KeyTransform], size: float = 1.0) -> torch.Tensor:
    model = biased_model(family, size)
    spec = replace(make_spec(model, kv), key_transforms=transforms)
    engine = Engine(model, LetterTokenizer(), spec, EngineLimits(max_context=1024, max_running=4, chunk_tokens=128))  # type: ignore[arg-type]
    return torch.cat(list(engine.logits(random_prompt(400))))


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3"])
def test_a_16_bit_cache_gives_the_same_answers_in_any_basis(family: str) -> None:
    transforms, _ = transforms_of(family)
    assert relative(logits("fp16", family, transforms), logits("fp16", family, {})) < 2e-3


def test_a_bias_that_is_not_stored_costs_nothing() -> None:
    transforms, _ = transforms_of("qwen2", 300.0)
    only_bias = {0: KeyTransform(bias=transforms[0].bias)}
    want = logits("fp16", "qwen2", only_bias, 300.0)
    plain = relative(logits("int4", "qwen2", {}, 300.0), want)
    subtracted = relative(logits("int4", "qwen2", only_bias, 300.0), want)
    assert subtracted < plain


@pytest.mark.parametrize("with_basis", [False, True])
def test_attention_through_the_engine_is_the_oracles(with_basis: bool) -> None:
    transforms, _ = transforms_of("qwen2", 30.0)
    used = transforms if with_basis else {0: KeyTransform(bias=transforms[0].bias)}
    got = logits("int4", "qwen2", used, 30.0)
    assert relative(got, oracle("int4", used, 30.0)) < 5e-3


def oracle(kv: str, transforms: dict[int, KeyTransform], size: float) -> torch.Tensor:
    from transformers import AttentionInterface

    from nibble.rotation import fold_value_rotation

    model = biased_model("qwen2", size)
    fmt = FORMATS[kv]
    for layer in model.model.layers:
        if fmt.v.rotated:
            fold_value_rotation(layer.self_attn, CHANNELS)

    def attention(module, query, key, value, mask, scaling, **_):  # type: ignore[no-untyped-def]
        transform = transforms.get(module.layer_idx, KeyTransform())
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        offset = transform.offset(torch.arange(len(k)))
        k = transform.store(k)
        stored = (k if offset is None else k - offset).half()
        options = {"fmt": fmt, "policy": PagePolicy(), "softmax_scale": scaling, "key_offset": offset}
        return reference_attention(transform.read(q), stored, v.half(), **options).out[None].to(query.dtype), None  # type: ignore[arg-type]

    AttentionInterface.register("key-oracle", attention)
    model.set_attn_implementation("key-oracle")
    return model(torch.tensor([random_prompt(400)]), use_cache=False).logits[0]


def test_what_is_written_is_read_and_damage_names_its_layer(tmp_path: Path) -> None:
    assert read_key_transforms(tmp_path) == {}
    transforms, _ = transforms_of("qwen2")
    write_key_transforms(tmp_path, transforms)
    found = read_key_transforms(tmp_path)
    assert sorted(found) == [0, 1]
    assert found[0].bias is not None
    assert found[1].bias is None
    positions = torch.arange(5)
    assert torch.equal(found[0].offset(positions), transforms[0].offset(positions))  # type: ignore[arg-type]
    tensors = load_file(tmp_path / KEYS_FILE)
    for change, message in (
        ({"layers.1.k.reader": torch.eye(32).expand(2, -1, -1).contiguous()}, "layer 1 K: reader"),
        ({"layers.1.k.forward": tensors["layers.1.k.forward"] * float("nan")}, "layer 1 K: NaN or Inf"),
        ({"layers.0.k.frequencies": None}, "layer 0 K: bias, frequencies are not all there"),
    ):
        changed = {name: tensor for name, tensor in {**tensors, **change}.items() if tensor is not None}
        save_file(changed, tmp_path / KEYS_FILE)
        with pytest.raises(NibbleError, match=message):
            read_key_transforms(tmp_path)


def test_the_spec_holds_no_transforms_by_default() -> None:
    assert CacheSpec((FORMATS["int4"],), 1, 32, PagePolicy()).key_transforms == {}


def test_a_basis_that_fp16_cannot_hold_is_refused() -> None:
    generator = torch.Generator().manual_seed(6)
    keys, queries, values = torch.randn(3, 1, HEADS, 300, CHANNELS, generator=generator)
    moments = LayerMoments.zero(torch.device("cpu"))
    moments.add(queries, keys + 5, values)
    basis = moments.basis(static=False)
    assert refuse_basis(moments, basis) is None
    worse = torch.eye(CHANNELS)
    worse[1, 0] = 1e6  # exact, but what it adds to one channel drowns that channel
    drowned = BasisChange(worse @ basis.forward, torch.linalg.inv(worse).mT @ basis.reader)
    assert "no balanced basis: in it fp16 pages would change scores by" in str(refuse_basis(moments, drowned))
