"""The runtime on a GPU: the oracle's answers, and the same answer whichever way the work is done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nibble.balance import BasisChange
from nibble.formats import FORMATS
from nibble.key_transform import KeyTransform
from nibble.models import load_model, load_tokenizer
from nibble.paths import REPOSITORY_ROOT
from nibble.runtime import Completion, Engine, EngineLimits, SamplingParams
from nibble.runtime.cache import CacheSpec, PoolSizes
from nibble.runtime.decode_graphs import DecodeGraphs
from nibble.runtime.decoder_ops import gate
from nibble.runtime.decoder_products import Share, multiply_by_library
from nibble.runtime.decoder_weights import DecoderWeights
from nibble.runtime.fp8_rows import Fp8Rows, quantize_rows
from nibble.runtime.weight_sources import ModelWeights
from nibble.visibility import PagePolicy
from tests.unit.oracle_kernels import ORACLE_KERNELS
from tests.unit.runtime_cases import LetterTokenizer, make_model, make_spec, oracle_logits, random_prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

EVAL_DATA = REPOSITORY_ROOT / "eval" / "data"
HEAD_DIM = 64  # the least that the kernels are made for
GREEDY = SamplingParams(max_tokens=100)
DRAWN = SamplingParams(max_tokens=100, temperature=0.8, top_k=30, top_p=0.95, seed=5)
MADE: list[Engine] = []


@pytest.fixture(autouse=True)
def check_pages() -> Iterator[None]:
    yield
    while MADE:
        MADE.pop().check_integrity()


def gpu_engine(
    kv: str | CacheSpec = "int4",
    family: str = "llama",
    policy: PagePolicy | None = None,
    dtype: torch.dtype = torch.float32,
    fp8: bool = False,
    **limits: Any,
) -> Engine:
    """fp32 weights, so that nothing but the cache and the kernels round."""
    model = make_model(family, head_dim=HEAD_DIM)
    device, layers = torch.device("cuda"), range(model.config.num_hidden_layers)
    rotated = layers if fp8 else ()
    weights = DecoderWeights.read(model.config, ModelWeights(model), dtype, device, fp8=fp8, rotated=rotated)
    spec = make_spec(model, kv, policy) if isinstance(kv, str) else kv
    values = {"max_context": 1024, "max_running": 4, "chunk_tokens": 256, **limits}
    engine = Engine(weights, LetterTokenizer(), spec, EngineLimits(**values))  # type: ignore[arg-type]
    MADE.append(engine)
    return engine


def all_logits(engine: Engine, tokens: list[int]) -> torch.Tensor:
    return torch.cat(list(engine.logits(tokens)))


def answers(engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [completion.token_ids for completion in engine.generate(prompts, params)]


def assert_same_but_for_ties(got: Completion, want: Completion) -> None:
    """Matrix products of other shapes round differently, and a rounded K may get the neighbouring code. So tokens are
    the same up to one where both runs find their own choice equally likely."""
    differing = [at for at, pair in enumerate(zip(got.token_ids, want.token_ids, strict=True)) if len(set(pair)) > 1]
    same = differing[0] if differing else len(got.token_ids)
    assert got.logprobs[: same + 1] == pytest.approx(want.logprobs[: same + 1], abs=5e-2)
    assert same > 10


def mean_kl(got: torch.Tensor, want: torch.Tensor) -> float:
    log_p, log_q = want.double().log_softmax(-1), got.double().log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


@pytest.mark.parametrize(
    ("family", "kv"),
    [*(("llama", kv) for kv in FORMATS), *((family, "int4") for family in ("qwen2", "qwen3", "mistral", "gemma3"))],
)
def test_prompts_and_decoding_are_the_oracles(family: str, kv: str) -> None:
    """The logits of a prompt, and the probability of each token decoded after it by the graphs."""
    tokens = random_prompt(400)
    model = make_model(family, head_dim=HEAD_DIM)
    spec = make_spec(model, kv)
    completion = gpu_engine(kv, family).generate([tokens], GREEDY)[0]
    want = oracle_logits(model, spec, tokens + completion.token_ids)
    got = all_logits(gpu_engine(kv, family), tokens)
    assert torch.isfinite(got).all()
    assert ((got - want[:400]).norm() / want[:400].norm()).item() < 1e-2
    assert mean_kl(got, want[:400]) < 1e-3
    chosen = want[399:-1].log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    assert (chosen - torch.tensor(completion.logprobs)).abs().mean() < 3e-2


@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (2, 2)])
def test_page_policies_are_the_oracles(sinks: int, recent: int) -> None:
    policy, tokens, model = PagePolicy(sinks, recent), random_prompt(300), make_model(head_dim=HEAD_DIM)
    completion = gpu_engine("int4", policy=policy).generate([tokens], GREEDY)[0]
    want = oracle_logits(model, make_spec(model, "int4", policy), tokens + completion.token_ids)
    chosen = want[299:-1].log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    assert (chosen - torch.tensor(completion.logprobs)).abs().mean() < 3e-2
    assert mean_kl(all_logits(gpu_engine("int4", policy=policy), tokens), want[:300]) < 1e-3


def test_a_mix_of_formats_in_a_basis_is_the_cpus() -> None:
    forward = torch.linalg.qr(torch.randn(2, HEAD_DIM, HEAD_DIM, generator=torch.Generator().manual_seed(0)))[0] * 1.5
    basis = BasisChange(forward.contiguous(), torch.linalg.inv(forward).mT.contiguous())
    plain = make_spec(make_model(head_dim=HEAD_DIM), "int4-static")
    transforms = {1: KeyTransform(basis, rotate_value=True)}
    spec = CacheSpec((FORMATS["k8v4"], FORMATS["int4-static"]), 2, HEAD_DIM, PagePolicy(), plain.scales, transforms)
    limits = EngineLimits(max_context=1024, device="cpu")
    cpu = Engine(make_model(head_dim=HEAD_DIM), LetterTokenizer(), spec, limits)  # type: ignore[arg-type]
    assert mean_kl(all_logits(gpu_engine(spec), random_prompt(300)), all_logits(cpu, random_prompt(300))) < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_cost_what_their_rounding_costs(dtype: torch.dtype) -> None:
    want = all_logits(gpu_engine(), random_prompt(300))
    assert mean_kl(all_logits(gpu_engine(dtype=dtype), random_prompt(300)), want) < 0.05


def test_fp8_products_are_those_of_their_codes() -> None:
    """By the library and by shares, alone and gated, of weights as large as a table's; a token's row is its own."""
    torch.manual_seed(0)
    weight = Fp8Rows.empty(512, 1024, torch.device("cuda"))
    weight.fill(torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16))
    for tokens in (1, 17, 64):
        x = (
            torch.randn(tokens, 1024, device="cuda", dtype=torch.bfloat16)
            * torch.logspace(-3, 3, tokens).cuda()[:, None]
        )
        rows = quantize_rows(x.bfloat16())
        on_cpu = quantize_rows(x.bfloat16().cpu())
        assert torch.equal(rows.values.cpu().float(), on_cpu.values.float())
        want = rows.dequantized() @ weight.dequantized().T
        gated = gate(want)
        from nibble.runtime.linear_kernels import multiply_shares

        for share in (None, Share((64,), 2, 128, 4, 4, True), Share((64,), 1, 128, 4)):
            got = (
                multiply_by_library(x.bfloat16(), weight)
                if share is None
                else multiply_shares(rows, weight, share, torch.bfloat16)
            )
            got = got.float().sum(0) if got.dim() == 3 else got.float()
            assert ((got - want).norm(dim=1) / want.norm(dim=1)).max() < 1e-2
        got = multiply_shares(rows, weight, Share((128, 64, 64), 1, 128, 3), torch.bfloat16, gated=True).float()
        assert ((got - gated).norm() / gated.norm()).item() < 1e-2


def test_fp8_weights_answer_as_on_a_cpu() -> None:
    """The library's products over tokens quantized by a kernel, against the same codes multiplied as fp32."""
    model, prompt = make_model(head_dim=HEAD_DIM), random_prompt(300)
    weights = DecoderWeights.read(
        model.config, ModelWeights(model), torch.bfloat16, torch.device("cpu"), fp8=True, rotated=(0, 1)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nibble.runtime.device_runner.AttentionKernels", lambda: ORACLE_KERNELS)
        limits = EngineLimits(max_context=1024, chunk_tokens=256)
        cpu = Engine(weights, LetterTokenizer(), make_spec(model, "fp16"), limits)  # type: ignore[arg-type]
        want = all_logits(cpu, prompt)
    engine = gpu_engine("fp16", dtype=torch.bfloat16, fp8=True)
    got = all_logits(engine, prompt)
    assert mean_kl(got, want) < min(0.05, 0.5 * mean_kl(got, all_logits(gpu_engine("fp16"), prompt)))
    completion = engine.generate([prompt], GREEDY)[0]
    decoded = all_logits(engine, prompt + completion.token_ids)[299:-1].log_softmax(-1)
    chosen = decoded.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    assert (chosen - torch.tensor(completion.logprobs)).abs().mean() < 0.1


@pytest.mark.model
def test_int4_costs_smollm2_what_it_costs_on_a_cpu(smollm2_source: Path) -> None:
    """Mean KL of int4 to fp16 over 1,024 tokens of a novel: by the kernels and by the CPU's runtime."""
    model, tokenizer = load_model(smollm2_source, "float32"), load_tokenizer(smollm2_source)
    tokens = tokenizer((EVAL_DATA / "persuasion.txt").read_text(encoding="utf-8")[20000:30000])["input_ids"][:1024]
    kl = {}
    for device in ("cuda", "cpu"):
        limits = EngineLimits(max_context=2048, max_running=1, chunk_tokens=512, device=device)
        both = [
            all_logits(Engine(load_model(smollm2_source, "float32"), tokenizer, make_spec(model, kv), limits), tokens)
            for kv in ("int4", "fp16")
        ]
        kl[device] = mean_kl(*both)
    assert 0 < kl["cpu"] < 0.01 and kl["cuda"] == pytest.approx(kl["cpu"], rel=0.1)


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_graphs_give_the_tokens_of_single_launches(monkeypatch: pytest.MonkeyPatch, params: SamplingParams) -> None:
    prompts = [random_prompt(length, seed=length) for length in (5, 64, 190)]
    graphs = gpu_engine(dtype=torch.bfloat16).generate(prompts, params)
    monkeypatch.setattr(DecodeGraphs, "_capture", lambda self: None)
    eager = gpu_engine(dtype=torch.bfloat16).generate(prompts, params)
    assert [(c.token_ids, c.logprobs) for c in graphs] == [(c.token_ids, c.logprobs) for c in eager]


def test_a_batch_gives_the_answers_of_single_requests() -> None:
    prompts = [random_prompt(20 + 13 * row, seed=row) for row in range(64)]
    together = gpu_engine(max_running=64).generate(prompts, GREEDY)
    for prompt, mine in zip(prompts[::13], together[::13], strict=True):
        assert_same_but_for_ties(mine, gpu_engine().generate([prompt], GREEDY)[0])


def test_chunks_and_a_warm_prefix_change_nothing() -> None:
    shared = random_prompt(300)
    prompts = [shared + random_prompt(20, seed=seed) for seed in range(3)]
    cold = [answers(gpu_engine(chunk_tokens=512), [prompt])[0] for prompt in prompts]
    warm = gpu_engine(chunk_tokens=100)
    assert [answers(warm, [prompt])[0] for prompt in prompts] == cold
    assert warm.stats().prefix_hit_tokens == 2 * 256
    whole = all_logits(gpu_engine(chunk_tokens=512), shared)
    for chunk in (64, 100, 16):
        got = all_logits(gpu_engine(chunk_tokens=chunk), shared)
        assert ((got - whole).norm() / whole.norm()).item() < 1e-2


def test_a_full_pool_preempts_and_gives_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [random_prompt(200, seed=seed) for seed in range(4)]
    roomy = answers(gpu_engine(), prompts, SamplingParams(max_tokens=150))
    monkeypatch.setattr(PoolSizes, "for_limits", lambda *_: PoolSizes(open_pages=12, sealed_pages=9))
    tight = gpu_engine(chunk_tokens=64)
    assert answers(tight, prompts, SamplingParams(max_tokens=150)) == roomy
    assert tight.stats().preemptions > 0
    assert tight.stats().pages_used == tight.stats().open_pages_used == 0


def test_what_was_in_the_pools_before_does_not_matter() -> None:
    want = all_logits(gpu_engine(), random_prompt(300))
    engine = gpu_engine()
    storage = engine.runner.backend.storage  # type: ignore[attr-defined]
    for opened, sealed in zip(storage.open, storage.sealed, strict=True):
        opened.fill_(torch.nan)
        sealed.fill_(255)
    assert torch.equal(all_logits(engine, random_prompt(300)), want)
    assert all(
        all(map(torch.isfinite, map(torch.tensor, c.logprobs))) for c in engine.generate([random_prompt(90)], GREEDY)
    )
