// Which way round the products of a consumer warp run. Tiles of 16 x 16 codes are one operand, query heads the other.
//
// Eight heads: tiles are the rows of a product, heads its columns, and lane 4 g + j holds rows g, g + 8 of heads 2j, 2j + 1.
// Sixteen heads: heads are the rows, the upper and lower eight rows of a tile the columns of two products, and the lane holds
// rows 2j, 2j + 1 (and 8 more) of heads g, g + 8. A tile's codes lie in the same registers either way, and every code is
// unpacked once for all heads of a group.
#pragma once
#include "config.cuh"

constexpr bool kHeadsAreRows = kHeadTiles == 2;
constexpr int kLaneRows = kHeadTiles;  // rows of each half of a tile in a lane's part of a product

DEVICE int first_row(int lane) { return kHeadsAreRows ? 2 * (lane & 3) : lane / 4; }
DEVICE int head_of(int lane, int h) { return kHeadsAreRows ? lane / 4 + 8 * h : 2 * (lane & 3) + h; }

// Rows of a tile (tokens, channels) by heads: this lane's part.
struct Product {
    float d[kHeadTiles][4];

    // Row first_row + i, 8 below for half 1, of the lane's head h.
    DEVICE float& at(int half, int h, int i) { return kHeadsAreRows ? d[half][2 * h + i] : d[0][2 * half + h]; }
    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < 4 * kHeadTiles; ++i) d[i / 4][i % 4] = 0;
    }
};

// Sixteen rows of a contraction by heads.
using HeadOperand = u32[2 * kHeadTiles];

DEVICE void multiply(Product& y, const u32 (&tile)[4], const HeadOperand& heads) {
    if constexpr (kHeadsAreRows) {
        mma(y.d[0], heads, tile[0], tile[2]);
        mma(y.d[1], heads, tile[1], tile[3]);
    } else {
        mma(y.d[0], tile, heads[0], heads[1]);
    }
}

// A product's rows as the rows of a contraction.
DEVICE void to_operand(HeadOperand& b, const Product& p) {
    if constexpr (kHeadsAreRows) {
#pragma unroll
        for (int i = 0; i < 4; ++i) b[i] = pack_halves(p.d[i / 2][2 * (i & 1)], p.d[i / 2][2 * (i & 1) + 1]);
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) b[i] = transpose8x8(pack_halves(p.d[0][2 * i], p.d[0][2 * i + 1]));
    }
}

// Over the lanes that hold other rows of the same heads.
DEVICE float max_over_rows(float x) {
#pragma unroll
    for (int step = kHeadsAreRows ? 1 : 4; step < (kHeadsAreRows ? 4 : 32); step *= 2)
        x = fmaxf(x, __shfl_xor_sync(kFullMask, x, step));
    return x;
}

constexpr u32 kOnes = 0x3c003c00u;  // a pair of ones in fp16

// Two sums over tokens for every head: of its probabilities, and of those times a number of each token. Tensor cores add
// them up: the other operand is ones in lanes of odd g and the tokens' numbers in the others.
struct TokenSums {
    float d[4];

    DEVICE void clear() { d[0] = d[1] = d[2] = d[3] = 0; }
    // `lower` and `upper` are numbers of the tokens 2j, 2j + 1 of the halves of a tile.
    DEVICE void add(const HeadOperand& p, u32 lower, u32 upper, int lane) {
        if (lane & 4) lower = upper = kOnes;
        if constexpr (kHeadsAreRows) {
            mma(d, p, lower, upper);
        } else {
            const u32 rows[4] = {lower, 0, upper, 0};
            mma(d, rows, p[0], p[1]);
        }
    }
    DEVICE void scale(int h, float by) {
        if (kHeadsAreRows)
            d[2 * h] *= by, d[2 * h + 1] *= by;
        else
            d[h] *= by;
    }
    DEVICE float probabilities(int h, int lane) const {
        return kHeadsAreRows ? d[2 * h + 1] : __shfl_sync(kFullMask, d[h], lane | 4);
    }
    DEVICE float numbers(int h, int lane) const {
        return kHeadsAreRows ? d[2 * h] : __shfl_sync(kFullMask, d[h], lane & ~4);
    }
    DEVICE void clear_numbers(int lane) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if (kHeadsAreRows)
                d[2 * h] = 0;
            else if (!(lane & 4))
                d[h] = 0;
    }
};
