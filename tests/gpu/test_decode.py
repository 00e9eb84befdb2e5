"""Decode attention on the GPU against the float64 oracle. Outputs are poisoned; unfilled rows of open pages are NaN."""

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nibble.errors import NibbleError
from nibble.formats import FORMATS, INT8_PAGE, KVFormat, ScaleKind
from nibble.kernels import compiler, driver
from nibble.kernels.decode import DecodeWorkspace, decode_attention_op
from nibble.kernels.instances import KERNEL_HEAD_DIMS
from nibble.visibility import PagePolicy
from tests.gpu.cases import DecodeCase, PagedBatch, make_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

INT4 = FORMATS["int4"]
STORED = [*FORMATS.values(), INT8_PAGE]
EDGES = (0, 1, 63, 64, 65, 128, 129, 192, 193, 1000, 3000, 4097)
SHORT = (1, 65, 700, 2500)
# Heads are the columns of products, or the rows.
columns_and_rows = pytest.mark.parametrize("group", [8, 12])


def check(batch: PagedBatch, tolerance: float = 1e-3, workspace: DecodeWorkspace | None = None) -> None:
    """Against the oracle. Groups past 8 round queries times scales: hard keys, whose logits reach hundreds, show it."""
    case = batch.case
    sum_tolerance = 2e-3
    if case.hard_keys and case.group > 8 and case.fmt.k.scale in (ScaleKind.PAGE_CHANNEL, ScaleKind.STATIC_CHANNEL):
        tolerance, sum_tolerance = 4 * tolerance, 5e-2
    out, log_sum_exp = batch.decode(workspace)
    for row, length in enumerate(case.lengths):
        if length == 0:
            assert (out[row] == 0).all() and (log_sum_exp[row] == -torch.inf).all()
            continue
        expected = batch.expected(row)
        error = (out[row].double() - expected.out[0]).norm() / expected.out[0].norm()
        assert error < tolerance, f"row {row}, {length} tokens: relative error {error:.2e}"
        torch.testing.assert_close(log_sum_exp[row].double(), expected.log_sum_exp[0], rtol=1e-6, atol=sum_tolerance)


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Freshly allocated outputs hold NaN."""
    blocks = [torch.full((1 << 22,), torch.nan, device="cuda") for _ in range(8)]
    del blocks


@columns_and_rows
@pytest.mark.parametrize("fmt", STORED, ids=lambda f: f.name)
@pytest.mark.parametrize("head_dim", KERNEL_HEAD_DIMS)
def test_formats_and_head_sizes(fmt: KVFormat, head_dim: int, group: int) -> None:
    check(make_batch(DecodeCase(fmt, SHORT, head_dim=head_dim, group=group)))


@columns_and_rows
@pytest.mark.parametrize("fmt", STORED, ids=lambda f: f.name)
@pytest.mark.parametrize("hard_keys", [False, True])
def test_lengths_at_page_edges(fmt: KVFormat, hard_keys: bool, group: int) -> None:
    check(make_batch(DecodeCase(fmt, EDGES, hard_keys=hard_keys, group=group)))


@pytest.mark.parametrize("group", range(1, 17))
@pytest.mark.parametrize("head_dim", [128, 256])
def test_groups(group: int, head_dim: int) -> None:
    check(make_batch(DecodeCase(INT4, SHORT, group=group, head_dim=head_dim)))


@columns_and_rows
@pytest.mark.parametrize("policy", [PagePolicy(0, 0), PagePolicy(2, 0), PagePolicy(3, 4)])
def test_policies(policy: PagePolicy, group: int) -> None:
    check(make_batch(DecodeCase(INT4, EDGES, policy=policy, group=group)))


@columns_and_rows
@pytest.mark.parametrize("window", [1, 64, 100, 1000])
def test_sliding_windows(window: int, group: int) -> None:
    check(make_batch(DecodeCase(INT4, EDGES, sliding_window=window, group=group)))


@columns_and_rows
def test_bf16_queries(group: int) -> None:
    check(make_batch(DecodeCase(INT4, SHORT, dtype=torch.bfloat16, group=group)), tolerance=4e-3)


@pytest.mark.parametrize("length", [8192, 32768])
def test_long_sequences(length: int) -> None:
    check(make_batch(DecodeCase(INT4, (length, 77), kv_heads=1)))


@columns_and_rows
@pytest.mark.parametrize("split_pages", [None, 1, 4, 16, 64])
def test_split_sizes(split_pages: int | None, group: int) -> None:
    batch = make_batch(DecodeCase(INT4, EDGES, group=group))
    check(batch, workspace=workspace_of(batch, split_pages))


@columns_and_rows
def test_more_units_than_a_block_lists_at_once(group: int) -> None:
    batch = make_batch(DecodeCase(INT4, (20000,) * 9, kv_heads=8, group=group))
    check(batch, workspace=workspace_of(batch, 1))


@columns_and_rows
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_a_row_does_not_depend_on_its_batch(fmt: KVFormat, group: int) -> None:
    """Alone, among others and at other places of a batch of 64: the same bits."""
    batch = make_batch(DecodeCase(fmt, (3000, 1, 4097, 640, 9000, 64, 193, 0), group=group))
    everyone = [row % 8 for row in range(64)]
    out, log_sum_exp = batch.select(everyone).decode()
    for rows in ([0], [2], [4], [4, 0], [7, 5, 4, 3, 2, 1], [2, 4] * 30):
        part_out, part_sum = batch.select(rows).decode()
        assert torch.equal(part_out, out[rows]) and torch.equal(part_sum, log_sum_exp[rows])
    for first in range(8, 64, 8):
        assert torch.equal(out[first : first + 8], out[:8])


@columns_and_rows
def test_repeated_launches_give_the_same_bits(group: int) -> None:
    """An error that moves is a race."""
    batch = make_batch(DecodeCase(INT4, (3000, 1, 4097, 640) * 8, kv_heads=8, group=group))
    workspace = batch.workspace()
    first = batch.decode(workspace)[0]
    assert all(torch.equal(batch.decode(workspace)[0], first) for _ in range(50))


def test_a_graph_serves_other_lengths_than_it_was_captured_with() -> None:
    batch = make_batch(DecodeCase(INT4, (3000, 4097, 640)))
    workspace, graph = batch.workspace(), torch.cuda.CUDAGraph()
    lengths = batch.seq_lens.clone()
    batch.decode(workspace)
    batch.seq_lens.fill_(1)
    with torch.cuda.graph(graph):
        out, log_sum_exp = batch.decode(workspace)
    batch.seq_lens.copy_(lengths)
    graph.replay()
    expected = batch.decode(workspace)
    assert torch.equal(out, expected[0]) and torch.equal(log_sum_exp, expected[1])


WRITE_LATE = """
struct Params { int* to; const int* from; int count; };
extern "C" __global__ void write_late(const Params p) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    for (long long begin = clock64(); clock64() - begin < 4000000;) {}
    for (int i = threadIdx.x; i < p.count; i += blockDim.x) p.to[i] = p.from[i];
}
"""


class WriteLateParams(ctypes.Structure):
    _fields_ = [("to", ctypes.c_void_p), ("source", ctypes.c_void_p), ("count", ctypes.c_int)]


@pytest.mark.parametrize("before", [(0, 0, 0), (4097, 3000, 1), (3000, 640, 4097), (2**31 - 1, -7, 2**20)])
def test_lengths_and_pages_may_be_written_by_the_kernel_before(
    before: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While that kernel runs, units are listed and pages looked up from whatever is there; what it writes counts."""
    (tmp_path / "late.cu").write_text(WRITE_LATE)
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "SOURCE_DIR", tmp_path)
        compiler._sources.cache_clear()
        write_late = driver.load_function(compiler.KernelSource("late.cu"), "write_late", 0)
    compiler._sources.cache_clear()
    batch = make_batch(DecodeCase(INT4, (3000, 4097, 640)))
    expected = batch.decode()
    written = torch.cat((batch.seq_lens, batch.block_table.flatten()))
    late = torch.randint_like(written, -(2**31), 2**31 - 1)
    late[:3] = torch.tensor(before, dtype=torch.int32)
    torch.cuda.synchronize()
    parameters = WriteLateParams(late.data_ptr(), written.data_ptr(), len(written))
    driver.launch(write_late, 1, 32, 0, parameters, overlaps=True)
    out, log_sum_exp = replace(batch, seq_lens=late[:3], block_table=late[3:].view_as(batch.block_table)).decode()
    assert torch.equal(out, expected[0]) and torch.equal(log_sum_exp, expected[1])


def test_torch_compile_keeps_the_op() -> None:
    batch = make_batch(DecodeCase(INT4, (700, 65)))
    workspace = batch.workspace()
    compiled = torch.compile(lambda: batch.decode(workspace)[0] + 0, fullgraph=True)
    assert torch.equal(compiled(), batch.decode(workspace)[0])


def test_operator_registration() -> None:
    batch = make_batch(DecodeCase(INT4, (700, 65)))
    workspace = batch.workspace()
    arguments = (
        batch.q, batch.open_pool, batch.sealed_pool, batch.block_table, batch.seq_lens, [torch.empty(0)] * 4,
        workspace.partial_out, workspace.partial_lse, [4, 1, 4, 2], [1, 1, 0], batch.softmax_scale,
        0,
    )  # fmt: skip
    torch.library.opcheck(decode_attention_op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_bad_arguments_are_named() -> None:
    batch = make_batch(DecodeCase(INT4, (700, 65)))
    with pytest.raises(NibbleError, match="decode workspace: too small"):
        batch.decode(workspace_of(batch.select([0]), 64))
    with pytest.raises(NibbleError, match=r"seq_lens: got torch\.int64"):
        replace(batch, seq_lens=batch.seq_lens.long()).decode()


def workspace_of(batch: PagedBatch, split_pages: int | None) -> DecodeWorkspace:
    case = batch.case
    return DecodeWorkspace.allocate(
        len(case.lengths),
        case.kv_heads * case.group,
        case.kv_heads,
        case.head_dim,
        batch.block_table.shape[1],
        "cuda",
        split_pages=split_pages,
    )
