"""The GPU runtime on a CPU: its decoder, step tables and late reading of tokens; the oracle stands in for kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nibble.errors import NibbleError
from nibble.formats import FORMATS
from nibble.runtime import Engine, EngineLimits, FinishReason, SamplingParams
from nibble.runtime.cache import CacheSpec, PoolSizes
from nibble.runtime.decoder_products import choose_share, multiply_in_parts, read_table, shares_of
from nibble.runtime.decoder_weights import DecoderWeights
from nibble.runtime.device import choose_device
from nibble.runtime.device_step import batch_buckets
from nibble.runtime.fp8_rows import quantize_rows
from nibble.runtime.load import warm_up
from nibble.runtime.weight_sources import DummyWeights, ModelWeights, load_decoder_weights
from nibble.visibility import PagePolicy
from tests.unit.oracle_kernels import ORACLE_KERNELS
from tests.unit.runtime_cases import (
    FAMILIES,
    MADE_ENGINES,
    LetterTokenizer,
    make_engine,
    make_model,
    make_spec,
    random_prompt,
)

CPU = torch.device("cpu")
DRAWN = SamplingParams(max_tokens=12, temperature=0.7, top_k=3, top_p=0.95, seed=1, logprobs=2)


@pytest.fixture(autouse=True)
def oracle_instead_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nibble.runtime.device_runner.AttentionKernels", lambda: ORACLE_KERNELS)


def device_engine(
    kv: str | CacheSpec = "int4", family: str = "llama", policy: PagePolicy | None = None, **limits: Any
) -> Engine:
    model = make_model(family)
    weights = DecoderWeights.read(model.config, ModelWeights(model), torch.float32, CPU)
    spec = make_spec(model, kv, policy) if isinstance(kv, str) else kv
    values = {"max_context": 1024, "max_running": 4, "chunk_tokens": 128, **limits}
    engine = Engine(weights, LetterTokenizer(), spec, EngineLimits(**values))  # type: ignore[arg-type]
    MADE_ENGINES.append(engine)
    return engine


def tokens_of(engine: Engine, prompts: list[list[int]], params: Any) -> list[list[int]]:
    return [completion.token_ids for completion in engine.generate(prompts, params)]


def test_chunks_follow_the_device_unless_they_are_given() -> None:
    engines = device_engine(chunk_tokens=None), make_engine(chunk_tokens=None, device="cpu"), device_engine()
    assert [engine.scheduler.limits.step_tokens for engine in engines] == [2048, 256, 128]


@pytest.mark.parametrize(("family", "kv"), [*((family, "int4") for family in FAMILIES), ("llama", "fp16")])
def test_answers_are_those_of_the_cpu_runtime(family: str, kv: str) -> None:
    """Prompts at page edges, long enough to seal while decoding; greedy and drawn in one batch."""
    prompts = [random_prompt(length, seed=length) for length in (5, 64, 129)]
    params = [SamplingParams(max_tokens=70), DRAWN, SamplingParams(max_tokens=3)]
    want = make_engine(kv, family, device="cpu").generate(prompts, params)
    got = device_engine(kv, family).generate(prompts, params)
    assert [c.token_ids for c in got] == [c.token_ids for c in want]
    assert got[0].logprobs == pytest.approx(want[0].logprobs, abs=2e-2)
    assert [list(top) for top in got[1].top_logprobs] == [list(top) for top in want[1].top_logprobs]


def test_layers_of_several_formats_and_bases() -> None:
    from nibble.balance import BasisChange
    from nibble.key_transform import KeyTransform

    forward = torch.linalg.qr(torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(0)))[0] * 1.5
    basis = BasisChange(forward, torch.linalg.inv(forward).mT.contiguous())
    plain = make_spec(make_model(), "int4-static")
    spec = CacheSpec(
        (FORMATS["k8v4"], FORMATS["int4-static"]), 2, 32, PagePolicy(0, 0), plain.scales,
        {1: KeyTransform(basis, rotate_value=True)},
    )  # fmt: skip
    model = make_model()
    cpu = Engine(model, LetterTokenizer(), spec, EngineLimits(max_context=512, device="cpu"))  # type: ignore[arg-type]
    want, got = (
        torch.cat(list(engine.logits(random_prompt(200)))) for engine in (cpu, device_engine(spec, max_context=512))
    )
    assert ((got - want).norm() / want.norm()).item() < 1e-2


def test_a_full_pool_and_a_warm_prefix_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [random_prompt(70) + random_prompt(60, seed=seed) for seed in range(4)]
    params = [SamplingParams(max_tokens=90), SamplingParams(max_tokens=90), DRAWN, SamplingParams(max_tokens=90)]
    roomy = tokens_of(device_engine(), prompts, params)
    monkeypatch.setattr(PoolSizes, "for_limits", lambda *_: PoolSizes(open_pages=8, sealed_pages=4))
    tight = device_engine(chunk_tokens=64)
    assert tokens_of(tight, prompts, params) == roomy
    assert tight.stats().preemptions > 0 and tight.stats().prefix_hit_tokens > 0
    assert tight.stats().pages_used == tight.stats().open_pages_used == 0


def test_warming_up_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    cold, warm = device_engine(max_context=100), device_engine(max_context=100)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "device", torch.device("cuda"))
        warm_up(warm)
    assert warm.stats() == cold.stats()
    assert tokens_of(warm, [random_prompt(70)], DRAWN) == tokens_of(cold, [random_prompt(70)], DRAWN)


def test_a_token_launched_too_many_is_dropped() -> None:
    """An end that shows only when tokens are read: the step already under way may not leave a trace."""
    engine = device_engine()
    free = engine.generate([random_prompt(40)], SamplingParams(max_tokens=30))[0]
    stops = SamplingParams(max_tokens=30, stop=(free.text[10:13],))
    stopped, other = engine.generate([random_prompt(40), random_prompt(90)], [stops, SamplingParams(max_tokens=40)])
    assert stopped.text == free.text[: free.text.index(free.text[10:13])]
    assert stopped.finish_reason is FinishReason.STOP
    assert other.token_ids == tokens_of(device_engine(), [random_prompt(90)], SamplingParams(max_tokens=40))[0]
    request = engine.submit(random_prompt(40), SamplingParams(max_tokens=30))
    tokens = 0
    while engine.has_work:
        tokens += sum(event.token_id is not None for event in engine.step())
        if tokens == 3:
            engine.cancel(request)
    assert tokens == 3 and engine.stats().pages_used == engine.stats().open_pages_used == 0


def test_the_context_limit_counts_unread_tokens() -> None:
    completion = device_engine(max_context=100).generate([random_prompt(90)], SamplingParams(max_tokens=50))[0]
    assert completion.finish_reason is FinishReason.LENGTH and len(completion.token_ids) == 11


@pytest.mark.parametrize("most", [1, 3, 8, 64, 200])
def test_every_batch_has_a_bucket_not_much_larger(most: int) -> None:
    buckets = batch_buckets(most)
    assert buckets == sorted(set(buckets)) and buckets[-1] == most
    for batch in range(1, most + 1):
        bucket = next(b for b in buckets if b >= batch)
        assert bucket <= max(2 * batch, 8) and bucket <= batch + max(8, batch // 4)


def test_dummy_weights_depend_on_name_and_seed_alone() -> None:
    config = make_model().config
    first, again, other = (
        DecoderWeights.read(config, DummyWeights(config, seed), torch.bfloat16, CPU) for seed in (0, 0, 1)
    )
    assert torch.equal(first.layers[1].qkv, again.layers[1].qkv)
    assert not torch.equal(first.layers[1].qkv, other.layers[1].qkv)
    assert first.layers[0].down.float().std() == pytest.approx(config.initializer_range / 2, rel=0.05)


def test_a_device_that_cannot_be_had_is_named() -> None:
    model = make_model()
    assert choose_device("auto", model.config, make_spec(model, "int4")).type in ("cpu", "cuda")
    if not torch.cuda.is_available():
        with pytest.raises(NibbleError, match="device: got 'cuda', allowed 'cpu' or 'auto' here: torch sees no GPU"):
            make_engine(device="cuda")
    with pytest.raises(NibbleError, match="device: got 'tpu', allowed auto, cpu, cuda"):
        EngineLimits(device="tpu")
    with pytest.raises(NibbleError, match=r"weight model.embed_tokens.weight: got nothing, allowed \(300, 192\)"):
        DecoderWeights.read(model.config, ModelWeights(torch.nn.Linear(1, 1)), torch.float32, CPU)


def test_weights_stream_from_a_checkpoint(tmp_path: Path) -> None:
    model = make_model("qwen3")
    model.save_pretrained(tmp_path)
    streamed = load_decoder_weights(tmp_path, "float32", CPU)
    direct = DecoderWeights.read(model.config, ModelWeights(model), torch.float32, CPU)
    assert torch.equal(streamed.layers[1].qkv, direct.layers[1].qkv) and torch.equal(streamed.head, direct.head)
    assert streamed.layers[0].q_norm is not None and streamed.generation_config is not None
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(NibbleError, match="can't be read"):
        load_decoder_weights(tmp_path, "auto", CPU)


def test_fp8_weights_are_what_their_codes_stand_for() -> None:
    """Every projection in e4m3 with a scale a row, read one after the other; tokens quantized beside them."""
    model = make_model("qwen2")
    spec = make_spec(model, "int4")
    sources = ModelWeights(model)
    plain, fp8 = (
        DecoderWeights.read(model.config, sources, torch.float32, CPU, fp8=fp8, rotated=(0, 1)) for fp8 in (False, True)
    )
    for name in ("qkv", "out", "gate_up", "down"):
        want, got = getattr(plain.layers[1], name), getattr(fp8.layers[1], name)
        assert got.values.dtype is torch.float8_e4m3fn and got.num_bytes == want.numel() + 4 * len(want)
        bound = torch.maximum(want.abs() / 16, want.abs().amax(-1, keepdim=True) / 448 / 2**9)
        assert ((got.dequantized() - want).abs() <= bound * 1.001).all()
        x = torch.randn(3, want.shape[1])
        rows, product = quantize_rows(x), multiply_in_parts(x, got)
        assert torch.allclose(product, rows.dequantized() @ got.dequantized().T, atol=1e-4)
        assert torch.allclose(multiply_in_parts(x[1:2], got), product[1:2], atol=1e-5)
    assert fp8.num_bytes < 0.5 * plain.num_bytes
    engines = [
        Engine(weights, LetterTokenizer(), spec, EngineLimits(max_context=512))  # type: ignore[arg-type]
        for weights in (plain, fp8)
    ]
    want, got = (torch.cat(list(engine.logits(random_prompt(100)))).log_softmax(-1) for engine in engines)
    assert 0 < (want.exp() * (want - got)).sum(-1).mean() < 0.2  # weights of a wide spread


def test_shares_of_the_table_are_whole_and_fit_a_multiprocessor() -> None:
    assert read_table(), "bench/linear.py writes it"
    for entry in read_table():
        for most_tokens, share in shares_of(entry["rows"], entry["width"]):
            if share is None:
                continue
            assert entry["rows"] % sum(share.rows) == 0 and entry["width"] % (share.parts * share.depth) == 0
            assert all(rows & (rows - 1) == 0 for rows in share.rows) and len(share.rows) <= 3
            itemsize = 2 if entry["kind"] == "bf16" else 1
            assert share.stages * (sum(share.rows) + most_tokens) * share.depth * itemsize <= 227 * 1024
    assert choose_share(torch.zeros(1, 4096, dtype=torch.bfloat16), torch.zeros(4096, 4096)) is None  # no GPU
