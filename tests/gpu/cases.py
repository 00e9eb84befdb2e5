"""Random paged caches on the GPU: the tensors a kernel takes, and the plain sequences the oracle takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from nibble.formats import PAGE_TOKENS, KVFormat, ScaleKind, SealedPageLayout, TensorFormat
from nibble.kernels.decode import DecodeWorkspace, decode_attention
from nibble.kernels.layout import seal_pages_for_cuda
from nibble.quantizer import ScaleZero, static_parameters
from nibble.reference import AttentionOutput, LayerScales, reference_attention
from nibble.visibility import PagePolicy


@dataclass(frozen=True)
class DecodeCase:
    fmt: KVFormat
    lengths: tuple[int, ...]
    head_dim: int = 128
    kv_heads: int = 2
    group: int = 8
    policy: PagePolicy = PagePolicy()
    sliding_window: int | None = None
    dtype: torch.dtype = torch.float16
    hard_keys: bool = False  # K ranges 50 times V's, a bias of 600 in a channel
    seed: int = 0


@dataclass(frozen=True)
class PagedBatch:
    case: DecodeCase
    q: torch.Tensor
    open_pool: torch.Tensor
    sealed_pool: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    scales: LayerScales
    sequences: list[tuple[torch.Tensor, torch.Tensor]]  # K, V: fp16 [tokens, kv_heads, head_dim]

    @property
    def softmax_scale(self) -> float:
        return float(self.case.head_dim**-0.5)

    def workspace(self) -> DecodeWorkspace:
        case = self.case
        return DecodeWorkspace.allocate(
            len(case.lengths),
            case.kv_heads * case.group,
            case.kv_heads,
            case.head_dim,
            self.block_table.shape[1],
            "cuda",
        )

    def decode(self, workspace: DecodeWorkspace | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return decode_attention(
            self.q,
            self.open_pool,
            self.sealed_pool,
            self.block_table,
            self.seq_lens,
            fmt=self.case.fmt,
            policy=self.case.policy,
            softmax_scale=self.softmax_scale,
            workspace=workspace or self.workspace(),
            scales=self.scales,
            sliding_window=self.case.sliding_window,
        )

    def select(self, rows: list[int]) -> PagedBatch:
        """The same cache with only some of the sequences asked."""
        index = torch.tensor(rows, device="cuda")
        lengths = tuple(self.case.lengths[row] for row in rows)
        return replace(
            self,
            case=replace(self.case, lengths=lengths),
            q=self.q[index].contiguous(),
            block_table=self.block_table[index].contiguous(),
            seq_lens=self.seq_lens[index].contiguous(),
            sequences=[self.sequences[row] for row in rows],
        )

    def expected(self, row: int) -> AttentionOutput:
        k, v = self.sequences[row]
        with torch.device("cuda"):
            return reference_attention(
                self.q[row : row + 1],
                k,
                v,
                fmt=self.case.fmt,
                policy=self.case.policy,
                softmax_scale=self.softmax_scale,
                scales=self.scales,
                sliding_window=self.case.sliding_window,
            )


def make_batch(case: DecodeCase) -> PagedBatch:
    torch.manual_seed(case.seed)
    sequences = [_sequence(case, length) for length in case.lengths]
    scales = _static_scales(case, sequences)
    pages = [-(-length // PAGE_TOKENS) for length in case.lengths]
    total = sum(pages) + 3
    page_bytes = SealedPageLayout(case.fmt, case.head_dim).page_bytes
    open_pool = torch.full((total, 2, case.kv_heads, PAGE_TOKENS, case.head_dim), torch.nan, device="cuda").half()
    sealed_pool = torch.full((total, case.kv_heads, page_bytes), 255, dtype=torch.uint8, device="cuda")
    block_table = torch.full((len(pages), max(1, *pages)), total - 1, dtype=torch.int32, device="cuda")
    places = torch.randperm(total, device="cuda")[: sum(pages)].int()
    first = 0
    for row, ((k, v), count) in enumerate(zip(sequences, pages, strict=True)):
        if count == 0:
            continue
        mine = places[first : first + count]
        first += count
        block_table[row, :count] = mine
        _fill_open(open_pool, mine, k, v)
        full = k.shape[0] // PAGE_TOKENS
        if full:
            sealed_pool[mine[:full].long()] = _seal(case.fmt, k, v, full, scales)
    heads = case.kv_heads * case.group
    q = (2 * torch.randn(len(pages), heads, case.head_dim, device="cuda")).to(case.dtype)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device="cuda")
    return PagedBatch(case, q, open_pool, sealed_pool, block_table, lengths, scales, sequences)


def _sequence(case: DecodeCase, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (length, case.kv_heads, case.head_dim)
    k, v = torch.randn(shape, device="cuda"), torch.randn(shape, device="cuda")
    if case.hard_keys:
        k[..., 1] *= 50
        k[..., 2] += 600
    return k.half(), v.half()


def _static_scales(case: DecodeCase, sequences: list[tuple[torch.Tensor, torch.Tensor]]) -> LayerScales:
    found: list[ScaleZero | None] = []
    for which, fmt in enumerate((case.fmt.k, case.fmt.v)):
        tokens = torch.cat([pair[which] for pair in sequences]).float()
        found.append(_static(tokens, fmt) if fmt.scale is ScaleKind.STATIC_CHANNEL else None)
    return LayerScales(*found)


def _static(tokens: torch.Tensor, fmt: TensorFormat) -> ScaleZero:
    return static_parameters(tokens.amin(0)[:, None], tokens.amax(0)[:, None], fmt)


def _fill_open(open_pool: torch.Tensor, mine: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Rows behind the end stay NaN."""
    for page, place in enumerate(mine.tolist()):
        rows = slice(page * PAGE_TOKENS, min(k.shape[0], (page + 1) * PAGE_TOKENS))
        count = rows.stop - rows.start
        open_pool[place, 0, :, :count] = k[rows].transpose(0, 1)
        open_pool[place, 1, :, :count] = v[rows].transpose(0, 1)


def _seal(fmt: KVFormat, k: torch.Tensor, v: torch.Tensor, full: int, scales: LayerScales) -> torch.Tensor:
    k_pages, v_pages = (
        x[: full * PAGE_TOKENS].unflatten(0, (full, PAGE_TOKENS)).transpose(1, 2).contiguous() for x in (k, v)
    )
    return seal_pages_for_cuda(k_pages, v_pages, fmt, scales.k, scales.v)
