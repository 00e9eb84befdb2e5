"""Where a code lies in a sealed page, as a function of its token and channel, for Triton kernels.

The inverse of `nibble.kernels.layout.operand_order`, which has the picture: an item of 16 T tokens, in it tiles of
16 x 16 codes, in a tile 32 lanes of 8 codes. 16-bit values keep row order.
"""

# Functions for the device have no types to check: Triton traces them.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

TILE = tl.constexpr(16)
LANES = tl.constexpr(32)


@triton.jit
def lane_place(channels, D: tl.constexpr):
    """Channel tile, lane of four (j) and place among that lane's four channels: the inverse of `lane_channel`."""
    chunk = channels // 32
    inside = channels % 32
    whole = (2 * chunk + 1) * TILE < D  # the chunk has both its tiles
    tile = 2 * chunk + tl.where(whole, inside // 4 % 2, 0)
    return tile, tl.where(whole, inside // 8, inside // 4), inside % 4


@triton.jit
def locate_codes(tokens, channels, D: tl.constexpr, BITS: tl.constexpr, T: tl.constexpr, IS_KEY: tl.constexpr):
    """Byte offset of a code among its page's codes, and its shift in that byte. T: token tiles of an item."""
    CHANNEL_TILES: tl.constexpr = D // TILE
    TILES: tl.constexpr = T * CHANNEL_TILES
    TILE_WORDS: tl.constexpr = BITS // 4
    LOAD_WORDS: tl.constexpr = 4 if TILES * TILE_WORDS % 4 == 0 else 2
    LOAD_TILES: tl.constexpr = LOAD_WORDS // TILE_WORDS
    item = tokens // (TILE * T)
    row = tokens % (TILE * T) // (2 * T)  # g of a K tile; 2 j + odd of a V tile
    token_tile = tokens % (2 * T) // 2
    parity = tokens % 2
    channel_tile, lane_of_four, nth = lane_place(channels, D)
    if IS_KEY:
        tile = channel_tile * T + token_tile
        lane = 4 * row + lane_of_four
        odd = nth % 2
        upper_row = parity
        upper_column = nth // 2
    else:
        tile = token_tile * CHANNEL_TILES + channel_tile
        lane = 4 * (2 * lane_of_four + nth % 2) + row // 2
        odd = row % 2
        upper_row = nth // 2
        upper_column = parity
    load = item * (TILES // LOAD_TILES) + tile // LOAD_TILES
    first = ((load * LANES + lane) * LOAD_TILES + tile % LOAD_TILES) * 8
    if BITS == 4:
        place = first + (upper_row + 2 * upper_column + 4 * odd)
        offsets = place // 2
        shifts = place % 2 * 4
    else:
        offsets = first + (odd + 2 * upper_row + 4 * upper_column)
        shifts = offsets * 0
    return offsets, shifts


@triton.jit
def read_codes(
    codes, tokens, channels, valid, D: tl.constexpr, BITS: tl.constexpr, T: tl.constexpr, IS_KEY: tl.constexpr
):
    """The codes of a page, or its values when they are 16-bit, as fp32 [tokens, channels]."""
    if BITS == 16:
        halves = codes.to(tl.pointer_type(tl.float16))
        stored = tl.load(halves + tokens[:, None] * D + channels[None, :], mask=valid, other=0.0)
    else:
        offsets, shifts = locate_codes(tokens[:, None], channels[None, :], D, BITS, T, IS_KEY)
        packed = tl.load(codes + offsets, mask=valid, other=0).to(tl.int32)
        stored = (packed >> shifts) & ((1 << BITS) - 1)
    return stored.to(tl.float32)
