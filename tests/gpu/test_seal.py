"""Append and seal on the GPU: byte for byte what the oracles give, also inside a CUDA graph."""

import pytest
import torch

from nibble.formats import FORMATS, PAGE_TOKENS, KVFormat
from nibble.kernels.instances import KERNEL_HEAD_DIMS
from nibble.kernels.seal import append_tokens, seal_pages_on_gpu
from tests.gpu.cases import DecodeCase, PagedBatch, make_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def full_pages(batch: PagedBatch) -> list[int]:
    rows = zip(batch.case.lengths, batch.block_table.tolist(), strict=True)
    return [page for length, table in rows for page in table[: length // PAGE_TOKENS]]


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize("head_dim", KERNEL_HEAD_DIMS)
def test_sealed_bytes_are_the_oracles(fmt: KVFormat, head_dim: int) -> None:
    batch = make_batch(DecodeCase(fmt, (640, 1280), head_dim=head_dim, hard_keys=True))
    pages, expected = full_pages(batch), batch.sealed_pool.clone()
    batch.sealed_pool.fill_(77)
    index = torch.tensor([-1, *pages], dtype=torch.int32, device="cuda")
    seal_pages_on_gpu(batch.open_pool, batch.sealed_pool, index, index, fmt=fmt, scales=batch.scales)
    assert torch.equal(batch.sealed_pool[pages], expected[pages])
    untouched = sorted(set(range(expected.shape[0])) - set(pages))
    assert (batch.sealed_pool[untouched] == 77).all()


def test_a_graph_seals_the_pages_that_are_listed_when_it_runs() -> None:
    fmt = FORMATS["int4"]
    batch = make_batch(DecodeCase(fmt, (640,)))
    pages, expected = full_pages(batch), batch.sealed_pool.clone()
    index = torch.full((len(pages),), -1, dtype=torch.int32, device="cuda")
    seal_pages_on_gpu(batch.open_pool, batch.sealed_pool, index, index, fmt=fmt)
    batch.sealed_pool.fill_(77)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seal_pages_on_gpu(batch.open_pool, batch.sealed_pool, index, index, fmt=fmt)
    index.copy_(torch.tensor(pages))
    graph.replay()
    assert torch.equal(batch.sealed_pool[pages], expected[pages])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", KERNEL_HEAD_DIMS)
def test_appended_tokens_land_in_their_slots(dtype: torch.dtype, head_dim: int) -> None:
    qkv = torch.randn(40, 3, 8, head_dim, device="cuda", dtype=dtype)
    pool = torch.zeros(9, 2, 8, PAGE_TOKENS, head_dim, device="cuda", dtype=torch.float16)
    slots = torch.randperm(9 * PAGE_TOKENS, device="cuda")[:40].int()
    slots[3] = -1
    expected, kept = torch.zeros_like(pool), slots >= 0
    page, place = slots[kept].long() // PAGE_TOKENS, slots[kept].long() % PAGE_TOKENS
    expected[page, 0, :, place] = qkv[kept, 1].half()
    expected[page, 1, :, place] = qkv[kept, 2].half()
    append_tokens(qkv[:, 1], qkv[:, 2], pool, slots)
    assert torch.equal(pool, expected)
