"""The byte order of codes in a sealed page on CUDA: tensor-core operand order.

The kernels multiply 16 x 16 tiles: K as tokens x channels, V as channels x tokens. The codes that one lane needs of a
tile lie together, so that a 16-byte load is two or four operands. A page is cut into items of 16 T tokens (T =
`token_tiles`), which can be fetched on their own:

    K codes:  [item][channel tile][token tile]   each tile 16 x 16 codes, spread over 32 lanes
    V codes:  [item][token tile][channel tile]

Lane 4 g + j of a tile holds rows g and g + 8 and columns 2j, 2j + 1, 2j + 8, 2j + 9. Row g + 8 e of a K tile is token
2 T g + 2 t + e of its item, and the same map gives the tokens of a V tile's columns, so that the scales of a lane's
tokens lie together as well. Channels (columns of K, rows of V) come in the order in which a lane reads 16 bytes of a
query, of a row of an fp16 page or of K's scales. 16-bit pages keep row order, as `nibble.packing` writes them.

Parameters stay where `SealedPageLayout` puts them. This is the oracle of the seal kernel, written to be read.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from nibble.formats import PAGE_TOKENS, KVFormat, SealedPageLayout, TensorFormat
from nibble.packing import pack_codes, seal_pages, unpack_codes
from nibble.quantizer import ScaleZero

TILE = 16
LANES = 32


def token_tiles(fmt: KVFormat, head_dim: int) -> int:
    """T: how many 16-token tiles make one item of a sealed page. A whole page when it is small enough."""
    if fmt.is_fp16:
        return 1
    return 4 if fmt.v.bits == 4 and head_dim < 256 else 2


@lru_cache
def operand_order(bits: int, tiles_of_tokens: int, head_dim: int, is_key: bool) -> torch.Tensor:
    """For every code in storage order, its place token * head_dim + channel in the page; int64 [64 * head_dim]."""
    channel_tiles = head_dim // TILE
    tiles = tiles_of_tokens * channel_tiles
    tile_words = bits // 4
    load_words = 4 if tiles * tile_words % 4 == 0 else 2
    load_tiles = load_words // tile_words
    item, load, lane, inner, value = torch.meshgrid(
        torch.arange(PAGE_TOKENS // (TILE * tiles_of_tokens)),
        torch.arange(tiles // load_tiles),
        torch.arange(LANES),
        torch.arange(load_tiles),
        torch.arange(8),
        indexing="ij",
    )
    tile, g, j = load * load_tiles + inner, lane // 4, lane % 4
    if bits == 4:  # nibbles: row half, column half, column parity
        upper_row, upper_column, odd = value & 1, value >> 1 & 1, value >> 2
    else:  # bytes: column parity, row half, column half
        odd, upper_row, upper_column = value & 1, value >> 1 & 1, value >> 2
    if is_key:
        channel = lane_channel(tile // tiles_of_tokens, j, 2 * upper_column + odd, head_dim)
        token = 2 * tiles_of_tokens * g + 2 * (tile % tiles_of_tokens) + upper_row
    else:
        channel = lane_channel(tile % channel_tiles, g // 2, 2 * upper_row + g % 2, head_dim)
        token = 2 * tiles_of_tokens * (2 * j + odd) + 2 * (tile // channel_tiles) + upper_column
    token = token + item * TILE * tiles_of_tokens
    return (token * head_dim + channel).flatten()


def lane_channel(channel_tile: torch.Tensor, j: torch.Tensor, nth: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The channel that is the nth (0..3) of lane j in a channel tile."""
    chunk = channel_tile // 2
    whole = 32 * chunk + 8 * j + 2 * (channel_tile % 2) + 4 * (nth // 2) + nth % 2
    last_of_odd = 32 * chunk + 4 * j + nth
    return torch.where((2 * chunk + 1) * TILE < head_dim, whole, last_of_odd)


def seal_pages_for_cuda(
    k: torch.Tensor,
    v: torch.Tensor,
    fmt: KVFormat,
    static_k: ScaleZero | None = None,
    static_v: ScaleZero | None = None,
) -> torch.Tensor:
    """`nibble.packing.seal_pages` with the codes in operand order: fp16 [..., 64, D] to uint8 [..., page_bytes]."""
    rows = seal_pages(k, v, fmt, static_k, static_v)
    layout = SealedPageLayout(fmt, k.shape[-1])
    return _map_codes(rows, layout, _to_operand_order)


def to_row_order(sealed: torch.Tensor, layout: SealedPageLayout) -> torch.Tensor:
    """Pages in operand order to pages in the CPU backend's row order; both uint8 [..., page_bytes]."""
    return _map_codes(sealed, layout, _from_operand_order)


def _map_codes(pages: torch.Tensor, layout: SealedPageLayout, convert) -> torch.Tensor:  # type: ignore[no-untyped-def]
    if layout.fmt.is_fp16:
        return pages
    tiles = token_tiles(layout.fmt, layout.head_dim)
    k = convert(pages[..., layout.k_codes], layout.fmt.k, tiles, layout.head_dim, True)
    v = convert(pages[..., layout.v_codes], layout.fmt.v, tiles, layout.head_dim, False)
    return torch.cat((k, v, pages[..., layout.v_codes.stop :]), dim=-1)


def _to_operand_order(packed: torch.Tensor, fmt: TensorFormat, tiles: int, head_dim: int, is_key: bool) -> torch.Tensor:
    rows = packed.unflatten(-1, (PAGE_TOKENS, head_dim * fmt.bits // 8))
    order = operand_order(fmt.bits, tiles, head_dim, is_key).to(packed.device)
    codes = unpack_codes(rows, fmt.bits).flatten(-2)[..., order]
    return codes if fmt.bits == 8 else codes[..., 0::2] | (codes[..., 1::2] << 4)


def _from_operand_order(
    packed: torch.Tensor, fmt: TensorFormat, tiles: int, head_dim: int, is_key: bool
) -> torch.Tensor:
    stored = packed if fmt.bits == 8 else torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    order = operand_order(fmt.bits, tiles, head_dim, is_key).to(packed.device)
    codes = torch.empty_like(stored)
    codes[..., order] = stored
    return pack_codes(codes.unflatten(-1, (PAGE_TOKENS, head_dim)), fmt.bits).flatten(-2)
