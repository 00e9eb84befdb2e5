"""Prefill attention against the oracle: formats, shapes, ragged chunks, windows, poison."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="prefill kernels are written in Triton")

from nibble.formats import FORMATS
from nibble.kernels.prefill import PrefillOutput, prefill_attention, prefill_attention_op
from nibble.kernels.prefill_launch import launch_portable
from nibble.visibility import PagePolicy
from tests.gpu.prefill_scene import Shape, Tokens, build_cache, make_tokens, oracle, relative_error

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 6e-3}  # of the output's norm: the rounding of the output's own type

RAGGED = {"query_lens": (0, 1, 63, 64, 65, 130), "seq_lens": (70, 1, 300, 64, 449, 700)}


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fresh memory (outputs, scratch) holds NaN."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def attend(shape: Shape, tokens: Tokens) -> PrefillOutput:
    cache, plan = build_cache(shape, tokens, DEVICE)
    q = torch.cat(tokens.q).to(DEVICE)
    return prefill_attention(q, cache, plan, softmax_scale=shape.softmax_scale, with_log_sum_exp=True)


def check(shape: Shape, tolerance: float | None = None, lse_tolerance: float = 1e-2) -> None:
    tokens = make_tokens(shape)
    got, expected = attend(shape, tokens), oracle(shape, tokens)
    assert relative_error(got.out, expected.out) < (tolerance or TOLERANCE[shape.dtype])
    assert got.log_sum_exp is not None
    assert (got.log_sum_exp.cpu().double() - expected.log_sum_exp).abs().max() < lse_tolerance


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("kv", FORMATS)
def test_every_format(kv: str, dtype: torch.dtype) -> None:
    check(Shape(kv=kv, dtype=dtype, **RAGGED))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("kv", ["int4", "int8"])
def test_head_dims(kv: str, head_dim: int) -> None:
    check(Shape(kv=kv, head_dim=head_dim, group=2, **RAGGED))


@pytest.mark.parametrize("group", [1, 3, 4, 5, 7, 8, 9, 16])
def test_groups(group: int) -> None:
    check(Shape(group=group, head_dim=64, **RAGGED))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 200])
def test_whole_prompts(length: int) -> None:
    check(Shape(query_lens=(length,), seq_lens=(length,), kv="k8v4"))


def test_long_prefix() -> None:
    check(Shape(group=4, kv_heads=1, query_lens=(90,), seq_lens=(8000,)))


@pytest.mark.parametrize("window", [1, 64, 100, 193])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 1), (64, 2), (256, 1)])
def test_sliding_window(window: int, head_dim: int, group: int) -> None:
    check(Shape(sliding_window=window, head_dim=head_dim, group=group, **RAGGED))


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (0, 2), (1, 0), (3, 1), (2, 16)])
def test_policies(sinks: int, recent: int, group: int) -> None:
    check(Shape(policy=PagePolicy(sinks, recent), group=group, **RAGGED))


def test_bf16_queries_past_the_range_of_fp16() -> None:
    check(Shape(dtype=torch.bfloat16, query_size=1e6, **RAGGED))


def test_key_bias_of_600() -> None:
    """fp16 holds a key near 600 to a quarter, in an open page as in the scratch."""
    check(Shape(k_bias=600.0, **RAGGED), tolerance=0.01, lse_tolerance=0.05)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(("chunk", "group"), [(64, 1), (100, 1), (100, 8), (256, 8)])
def test_chunked_is_unchunked_bit_for_bit(chunk: int, group: int, dtype: torch.dtype) -> None:
    whole = Shape(query_lens=(600,), seq_lens=(600,), group=group, dtype=dtype)
    tokens = make_tokens(whole)
    expected = attend(whole, tokens)
    for start in range(0, 600, chunk):
        stop = min(600, start + chunk)
        shape = replace(whole, query_lens=(stop - start,), seq_lens=(stop,))
        part = Tokens([tokens.q[0][start:stop]], [tokens.k[0][:stop]], [tokens.v[0][:stop]], tokens.scales)
        assert torch.equal(attend(shape, part).out, expected.out[start:stop])


@pytest.mark.parametrize("copies", [1, 11], ids=["batch of 6", "batch of 66"])
def test_alone_is_in_a_batch_bit_for_bit(copies: int) -> None:
    batch = Shape(head_dim=64, group=4, **{name: lengths * copies for name, lengths in RAGGED.items()})
    six = make_tokens(Shape(head_dim=64, group=4, **RAGGED))
    tokens = Tokens(six.q * copies, six.k * copies, six.v * copies, six.scales)
    expected = attend(batch, tokens).out.split(list(batch.query_lens))
    for index, (query_len, seq_len) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        if query_len and index < 6:
            one = Tokens([tokens.q[index]], [tokens.k[index]], [tokens.v[index]], tokens.scales)
            shape = replace(batch, query_lens=(query_len,), seq_lens=(seq_len,))
            assert torch.equal(attend(shape, one).out, expected[index])
        assert torch.equal(expected[index], expected[index % 6])


def test_a_graph_gives_the_bits_of_eager_launches() -> None:
    shape = Shape(**RAGGED)
    tokens = make_tokens(shape)
    cache, plan = build_cache(shape, tokens, DEVICE)
    q = torch.cat(tokens.q).to(DEVICE)
    zeros, graph = torch.zeros_like(q), torch.cuda.CUDAGraph()
    torch.use_deterministic_algorithms(False)  # it would fill memory inside the graph
    expected = prefill_attention(q, cache, plan, softmax_scale=shape.softmax_scale).out
    with torch.cuda.graph(graph):
        out = prefill_attention(zeros, cache, plan, softmax_scale=shape.softmax_scale).out
    zeros.copy_(q)
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_portable_kernel(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nibble.kernels.prefill_launch.launch_hopper", launch_portable)
    check(Shape(head_dim=head_dim, group=3, **RAGGED))
    check(Shape(head_dim=head_dim, group=4, sliding_window=100, dtype=torch.bfloat16, **RAGGED))


def test_operator_registration() -> None:
    shape = Shape(head_dim=64, group=2)
    cache, plan = build_cache(shape, make_tokens(shape), DEVICE)
    q = torch.randn(200, 4, 64, dtype=torch.float16, device=DEVICE)
    arguments = (
        q, cache.open_pool, cache.sealed_pool, cache.open_table, cache.sealed_table, plan.tiles, plan.page_pairs,
        plan.sequences, plan.scratch_pages, [], "4 page_channel 4 token", 1, 1, 0, 0.125, True,
    )  # fmt: skip
    torch.library.opcheck(prefill_attention_op, arguments, test_utils=("test_schema", "test_faketensor"))
