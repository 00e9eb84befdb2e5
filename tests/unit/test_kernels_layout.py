"""The byte order of sealed pages on CUDA, against the row order of the CPU backend."""

import pytest
import torch

from nibble.formats import FORMATS, PAGE_TOKENS, KVFormat, SealedPageLayout
from nibble.kernels.instances import KERNEL_HEAD_DIMS
from nibble.kernels.layout import LANES, operand_order, seal_pages_for_cuda, to_row_order, token_tiles
from nibble.packing import seal_pages
from nibble.quantizer import static_parameters

CODED = [fmt for fmt in FORMATS.values() if not fmt.is_fp16]


def random_pages(head_dim: int, seed: int) -> torch.Tensor:
    return torch.randn(2, 3, PAGE_TOKENS, head_dim, generator=torch.Generator().manual_seed(seed)).half()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize("head_dim", KERNEL_HEAD_DIMS)
def test_pages_for_cuda_hold_the_same_codes_as_rows(fmt: KVFormat, head_dim: int) -> None:
    k, v = random_pages(head_dim, 0), random_pages(head_dim, 1)
    limit = torch.full((3, 1, head_dim), 4.0)
    static = [static_parameters(-limit, limit, part) if fmt.needs_calibration else None for part in (fmt.k, fmt.v)]
    rows = seal_pages(k, v, fmt, *static)
    operands = seal_pages_for_cuda(k, v, fmt, *static)
    assert operands.shape == rows.shape
    assert torch.equal(to_row_order(operands, SealedPageLayout(fmt, head_dim)), rows)


@pytest.mark.parametrize("fmt", CODED, ids=lambda f: f.name)
@pytest.mark.parametrize("head_dim", KERNEL_HEAD_DIMS)
def test_every_code_has_one_place_and_items_stay_together(fmt: KVFormat, head_dim: int) -> None:
    tiles = token_tiles(fmt, head_dim)
    for bits, is_key in ((fmt.k.bits, True), (fmt.v.bits, False)):
        order = operand_order(bits, tiles, head_dim, is_key)
        assert torch.equal(order.sort().values, torch.arange(PAGE_TOKENS * head_dim))
        tokens_of_items = (order // head_dim).view(-1, 16 * tiles * head_dim) // (16 * tiles)
        assert (tokens_of_items == torch.arange(tokens_of_items.shape[0])[:, None]).all()


def test_a_lane_of_a_key_tile_holds_the_rows_and_channels_of_an_mma_operand() -> None:
    """Lane 4 g + j, 4 bits: one word of rows g, g + 8 (neighbouring tokens) and its four channels."""
    order = operand_order(4, 4, 128, is_key=True).view(-1, LANES, 4, 8)
    lane, g, j = 4 * 5 + 2, 5, 2
    tokens, channels = order[0, lane, 0] // 128, order[0, lane, 0] % 128
    assert tokens.tolist() == [8 * g, 8 * g + 1] * 4
    assert channels.tolist() == [8 * j, 8 * j, 8 * j + 4, 8 * j + 4, 8 * j + 1, 8 * j + 1, 8 * j + 5, 8 * j + 5]
