"""Append and seal on the GPU: byte for byte what the oracles give, also inside a CUDA graph."""

import pytest
import torch

from nibble.formats import FORMATS, INT8_PAGE, PAGE_TOKENS, KVFormat
from nibble.kernels.instances import KERNEL_HEAD_DIMS
from nibble.kernels.seal import append_tokens, append_tokens_op, seal_pages_on_gpu, seal_pages_op
from tests.gpu.cases import DecodeCase, PagedBatch, make_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def full_pages(batch: PagedBatch) -> list[int]:
    rows = zip(batch.case.lengths, batch.block_table.tolist(), strict=True)
    return [page for length, table in rows for page in table[: length // PAGE_TOKENS]]


@pytest.mark.parametrize("fmt", [*FORMATS.values(), INT8_PAGE], ids=lambda f: f.name)
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


def test_a_graph_appends_and_seals_as_eager_launches_do() -> None:
    """The last token of every page is appended, then the page is sealed; slots and pages change between replays."""
    fmt = FORMATS["int4"]
    batch = make_batch(DecodeCase(fmt, (64 * 64,)))
    pages, expected = torch.tensor(full_pages(batch), dtype=torch.int32, device="cuda"), batch.sealed_pool.clone()
    kv = batch.open_pool[pages.long(), :, :, -1].clone()  # [64, 2, kv_heads, head_dim]
    batch.open_pool[pages.long(), :, :, -1] = 0
    slots, index = torch.full((64,), -1, dtype=torch.int32, device="cuda"), torch.full_like(pages, -1)

    def step() -> None:
        append_tokens(kv[:, 0], kv[:, 1], batch.open_pool, slots)
        seal_pages_on_gpu(batch.open_pool, batch.sealed_pool, index, index, fmt=fmt)

    step()
    batch.sealed_pool.fill_(77)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for some in (slice(0, 1), slice(1, 64)):  # one page alone, the others together
        slots.fill_(-1), index.fill_(-1)
        slots[some], index[some] = pages[some] * PAGE_TOKENS + PAGE_TOKENS - 1, pages[some]
        graph.replay()
    assert torch.equal(batch.sealed_pool[pages.long()], expected[pages.long()])


def test_a_step_reads_what_its_launches_write() -> None:
    """Append, seal and decode are launched before the one ahead has ended: thirty steps give the bits of the first."""
    lengths = tuple(PAGE_TOKENS * pages + 1 for pages in (64, 50, 4, 20)) * 4
    batch = make_batch(DecodeCase(FORMATS["int4"], lengths, kv_heads=8))
    expected, workspace = batch.decode(), batch.workspace()
    table, rows = batch.block_table.long(), torch.arange(len(lengths), device="cuda")
    newest = table[rows, torch.tensor(lengths, device="cuda") // PAGE_TOKENS]
    made_far = [batch.case.policy.first_recent_page(length - 1) - 1 for length in lengths]
    far = table[rows, torch.tensor(made_far, device="cuda")]
    slots, index = (newest * PAGE_TOKENS).int(), far.int()
    k, v = (torch.stack([pair[which][-1] for pair in batch.sequences]) for which in (0, 1))

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        batch.open_pool[:, :, :, 0].index_fill_(0, newest, torch.nan)
        batch.sealed_pool.index_fill_(0, far, 77)
        append_tokens(k, v, batch.open_pool, slots)
        seal_pages_on_gpu(batch.open_pool, batch.sealed_pool, index, index, fmt=batch.case.fmt)
        return batch.decode(workspace)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [step() for _ in range(30)]
    graph.replay()
    for out, log_sum_exp in results:
        assert torch.equal(out, expected[0]) and torch.equal(log_sum_exp, expected[1])


def test_operator_registration() -> None:
    batch = make_batch(DecodeCase(FORMATS["int4"], (640,)))
    index = torch.tensor(full_pages(batch), dtype=torch.int32, device="cuda")
    seal = (batch.open_pool, batch.sealed_pool, index, index, [torch.empty(0)] * 4, [4, 1, 4, 2])
    kv, slots = torch.randn(2, 3, 2, 128, device="cuda").half(), torch.arange(3, dtype=torch.int32, device="cuda")
    append = (kv[0], kv[1], torch.zeros(1, 2, 2, PAGE_TOKENS, 128, device="cuda").half(), slots)
    for op, arguments in ((seal_pages_op, seal), (append_tokens_op, append)):
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
