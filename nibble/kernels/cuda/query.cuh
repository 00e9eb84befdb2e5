// Queries: one warp turns the queries of a unit's group into tensor-core operands in shared memory, a unit ahead of
// the consumers.
//
// Lane 4 g + j of head tile t holds head 8 t + g and of its channels 32 i + 8 j .. + 7 for every i. The channel order of a
// contraction is free, so this is the order that lets a lane fetch queries, scales, zero points and fp16 keys 16 bytes at
// a time. Each head is normalised by a power of two so that its largest value lies in [4, 8): times any page scale, which
// is at most 131008 / 15, it stays inside fp16, and what is lost at the small end is below fp16's own rounding.
#pragma once
#include "shared.cuh"

// The first channel of a lane's piece `chunk`; an odd last channel tile is split over half pieces.
DEVICE int chunk_channel(int chunk, int j) {
    const bool is_half_chunk = (kChannelTiles & 1) && chunk == kQueryChunks - 1;
    return 32 * chunk + (is_half_chunk ? 4 : 8) * j;
}
DEVICE constexpr int chunk_channels(int chunk) { return (kChannelTiles & 1) && chunk == kQueryChunks - 1 ? 4 : 8; }

// The pieces' pairs of channels, as the B operands of the chunk's two channel tiles: (x, y) and (z, w).
DEVICE uint4 in_operand_order(int chunk, const u32 (&pairs)[4]) {
    if (chunk_channels(chunk) == 4) return make_uint4(pairs[0], pairs[1], 0, 0);
    return make_uint4(pairs[0], pairs[2], pairs[1], pairs[3]);
}

DEVICE uint4* query_operands(Shared* s, int buffer, int set) {
    return s->queries[buffer] + set * (kQuerySetBytes / 16);
}
// Per head: {to turn a raw product into log2 units, the same for a product with codes, the zero-point term, unused}.
DEVICE float4* query_factors(Shared* s, int buffer) {
    return reinterpret_cast<float4*>(s->queries[buffer] + kQuerySets * (kQuerySetBytes / 16));
}

DEVICE float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(kFullMask, x, 1));
    return fmaxf(x, __shfl_xor_sync(kFullMask, x, 2));
}
DEVICE float row_sum(float x) {
    x += __shfl_xor_sync(kFullMask, x, 1);
    return x + __shfl_xor_sync(kFullMask, x, 2);
}
// The power of two that brings `largest` into [4, 8).
DEVICE float normaliser(float largest) {
    if (!(largest > 0)) return 1.0f;
    const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
    return __uint_as_float(static_cast<u32>(127 + 2 - min(max(exponent, -100), 120)) << 23);
}

DEVICE void load_query(const DecodeParams& p, const Unit& unit, int head, int j, float (&x)[kQueryChunks * 8]) {
    const long long row = (static_cast<long long>(unit.batch) * p.kv_heads + unit.kv_head) * p.group + head;
    const bool valid = head < p.group;
#pragma unroll
    for (int chunk = 0; chunk < kQueryChunks; ++chunk) {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            u32 bits = 0;
            if (valid && 2 * pair < chunk_channels(chunk))
                bits = reinterpret_cast<const u32*>(p.q + row * kHeadDim + chunk_channel(chunk, j))[pair];
            x[chunk * 8 + 2 * pair] = p.is_bfloat ? bfloat_low(bits) : half_low(bits);
            x[chunk * 8 + 2 * pair + 1] = p.is_bfloat ? bfloat_high(bits) : half_high(bits);
        }
    }
}

// Stores x, normalised, as operands, and what their rounding lost at `lost`; returns the normaliser.
template <bool kKeepLost>
DEVICE float store_operands(uint4* to, uint4* lost, const float (&x)[kQueryChunks * 8]) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < kQueryChunks * 8; ++i) largest = fmaxf(largest, fabsf(x[i]));
    const float by = normaliser(row_max(largest));
#pragma unroll
    for (int chunk = 0; chunk < kQueryChunks; ++chunk) {
        u32 kept[4], rest[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float a = x[chunk * 8 + 2 * i] * by, b = x[chunk * 8 + 2 * i + 1] * by;
            kept[i] = pack_halves(a, b);
            rest[i] = pack_halves(a - half_low(kept[i]), b - half_high(kept[i]));
        }
        to[chunk * 32] = in_operand_order(chunk, kept);
        if (kKeepLost) lost[chunk * 32] = in_operand_order(chunk, rest);
    }
    return by;
}

// x <- x * static scale; returns the sum of x * static zero.
DEVICE float apply_static_scales(const DecodeParams& p, int kv_head, int j, float (&x)[kQueryChunks * 8]) {
    float sum = 0;
#pragma unroll
    for (int chunk = 0; chunk < kQueryChunks; ++chunk) {
#pragma unroll
        for (int i = 0; i < chunk_channels(chunk); ++i) {
            const int channel = kv_head * kHeadDim + chunk_channel(chunk, j) + i;
            sum += x[chunk * 8 + i] * p.k_zero[channel];
            x[chunk * 8 + i] *= p.k_scale[channel];
        }
    }
    return row_sum(sum);
}

// For later architectures the compiler would keep the queries of both head tiles in registers that there are not.
#if __CUDA_ARCH__ >= 1000
constexpr int kTilesAtOnce = 1;
#else
constexpr int kTilesAtOnce = kHeadTiles;
#endif

DEVICE void prepare_queries(const DecodeParams& p, const Unit& unit, Shared* s, int buffer, int lane) {
    const int j = lane & 3;
    const float to_log2 = p.softmax_scale * 1.4426950408889634f;
#pragma unroll kTilesAtOnce
    for (int tile = 0; tile < kHeadTiles; ++tile) {
        const int head = tile * 8 + lane / 4;
        float x[kQueryChunks * 8];
        load_query(p, unit, head, j, x);
        const int at = tile * kQueryChunks * 32 + lane;
        const float raw = to_log2 / store_operands<false>(query_operands(s, buffer, 0) + at, nullptr, x);
        float coded = raw, zero = 0;
        if (kKScale == kToken) {
            float sum = 0;
#pragma unroll
            for (int i = 0; i < kQueryChunks * 8; ++i) sum += x[i];
            zero = row_sum(sum) * to_log2;
        }
        if constexpr (kKScale == kStaticChannel) {
            zero = apply_static_scales(p, unit.kv_head, j, x) * to_log2;
            coded = to_log2 / store_operands<true>(query_operands(s, buffer, 1) + at, query_operands(s, buffer, 2) + at, x);
        }
        if (j == 0) query_factors(s, buffer)[head] = make_float4(raw, coded * 16777216.0f, zero, 0);
    }
}

// The query warp: a unit's queries go to the buffer of its number's parity once the consumers have read the one before.
DEVICE void prepare_units(const DecodeParams& p, Shared* s, int begin, int end, int lane) {
    for (int n = begin; n < end; ++n) {
        barrier_wait_asleep(shared_address(&s->query_empty[n & 1]), n >> 1 & 1 ^ 1);
        prepare_queries(p, s->units[n % kUnitTable], s, n & 1, lane);
        __syncwarp();
        arrive_for_warp(shared_address(&s->query_full[n & 1]), lane);
    }
}
