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

// Puts a head's pairs of channels of a piece where the consumers find them. Eight heads: the two B operands of the piece's channel
// tiles side by side. Sixteen heads: an A operand for each channel tile, [tile of the piece][piece][lane].
DEVICE void store_piece(uint4* operands, int lane, int chunk, int head_tile, const u32 (&pairs)[4]) {
    const bool whole = chunk_channels(chunk) == 8;
    const u32 x = pairs[0], y = whole ? pairs[2] : pairs[1], z = whole ? pairs[1] : 0, w = whole ? pairs[3] : 0;
    if (kHeadTiles == 1) {
        operands[chunk * 32 + lane] = make_uint4(x, y, z, w);
        return;
    }
    u32* even = reinterpret_cast<u32*>(operands + chunk * 32 + lane);
    u32* odd = reinterpret_cast<u32*>(operands + (kQueryChunks + chunk) * 32 + lane);
    even[head_tile] = x, even[2 + head_tile] = y;
    odd[head_tile] = z, odd[2 + head_tile] = w;
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

// Where registers are scarce, or static scales make the code long for the instruction cache, a lane's query is read again each
// time.
constexpr bool kKeepsQuery = kKScale != kStaticChannel && (!kShiftsRegisters || kHeadDim <= 128);
constexpr int kPairsAtOnce = kKeepsQuery ? 4 * kQueryChunks : 8;

// A lane's pairs of channels of a head, as they were given.
struct LaneQuery {
    const u16* row;  // null: there is no such head
    int j;
    bool is_bfloat;
    u32 pairs[kKeepsQuery ? 4 * kQueryChunks : 1];

    DEVICE LaneQuery(const DecodeParams& p, const Unit& unit, int head, int lane_j) : j(lane_j), is_bfloat(p.is_bfloat) {
        const long long index = (static_cast<long long>(unit.batch) * p.kv_heads + unit.kv_head) * p.group + head;
        row = head < p.group ? p.q + index * kHeadDim : nullptr;
        if constexpr (kKeepsQuery) {
#pragma unroll
            for (int i = 0; i < 4 * kQueryChunks; ++i) pairs[i] = load(i / 4, i % 4);
        }
    }
    DEVICE u32 load(int chunk, int pair) const {
        if (!row || 2 * pair >= chunk_channels(chunk)) return 0;
        return reinterpret_cast<const u32*>(row + chunk_channel(chunk, j))[pair];
    }
    // Keeps the compiler from keeping what it has converted.
    DEVICE void forget_numbers() {
#pragma unroll
        for (u32& pair : pairs) asm volatile("" : "+r"(pair));
    }
    DEVICE float2 operator()(int chunk, int pair) const {
        const u32 bits = kKeepsQuery ? pairs[kKeepsQuery ? 4 * chunk + pair : 0] : load(chunk, pair);
        return is_bfloat ? make_float2(bfloat_low(bits), bfloat_high(bits)) : make_float2(half_low(bits), half_high(bits));
    }
};

// The same times numbers of the channels, static scales or zero points.
struct WeightedQuery {
    LaneQuery& x;
    const float* weights;  // of the KV head's channels

    DEVICE void forget_numbers() { x.forget_numbers(); }
    DEVICE float2 operator()(int chunk, int pair) const {
        if (2 * pair >= chunk_channels(chunk)) return make_float2(0, 0);
        const float2 y = x(chunk, pair);
        const float* by = weights + chunk_channel(chunk, x.j) + 2 * pair;
        return make_float2(y.x * by[0], y.y * by[1]);
    }
};

// What storing a head's operands found out.
struct Stored {
    float by;    // what normalises the head
    float sum;   // of x
    float lost;  // the sum of what rounding lost, normalised
};

// Stores x(chunk, pair) of a head of a head tile, normalised, as operands, and what their rounding lost at `lost`.
template <bool kKeepLost, class Query>
DEVICE Stored store_operands(uint4* to, uint4* lost, int lane, int head_tile, Query&& x) {
    float largest = 0, sum = 0, lost_sum = 0;
#pragma unroll kPairsAtOnce
    for (int i = 0; i < kQueryChunks * 4; ++i) {
        const float2 y = x(i / 4, i % 4);
        largest = fmaxf(largest, fmaxf(fabsf(y.x), fabsf(y.y)));
        sum += y.x + y.y;
    }
    x.forget_numbers();
    const float by = normaliser(row_max(largest));
#pragma unroll kPairsAtOnce / 4
    for (int chunk = 0; chunk < kQueryChunks; ++chunk) {
        u32 kept[4], rest[4];
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const float2 y = x(chunk, pair);
            kept[pair] = pack_halves(y.x * by, y.y * by);
            const float2 left = make_float2(y.x * by - half_low(kept[pair]), y.y * by - half_high(kept[pair]));
            rest[pair] = pack_halves(left.x, left.y);
            lost_sum += left.x + left.y;
        }
        store_piece(to, lane, chunk, head_tile, kept);
        if (kKeepLost) store_piece(lost, lane, chunk, head_tile, rest);
    }
    return {by, row_sum(sum), row_sum(lost_sum)};
}

DEVICE float sum_of(const WeightedQuery& x) {
    float sum = 0;
#pragma unroll kPairsAtOnce
    for (int i = 0; i < kQueryChunks * 4; ++i) {
        const float2 y = x(i / 4, i % 4);
        sum += y.x + y.y;
    }
    x.x.forget_numbers();
    return row_sum(sum);
}

DEVICE void prepare_queries(const DecodeParams& p, const Unit& unit, Shared* s, int buffer, int lane) {
    const int j = lane & 3;
    const float to_log2 = p.softmax_scale * 1.4426950408889634f;
#pragma unroll 1
    for (int tile = 0; tile < kHeadTiles; ++tile) {
        const int head = tile * 8 + lane / 4;
        LaneQuery x(p, unit, head, j);
        const Stored stored = store_operands<false>(query_operands(s, buffer, 0), nullptr, lane, tile, x);
        const float raw = to_log2 / stored.by;
        float coded = raw, zero = stored.sum * to_log2;
        if constexpr (kKScale == kStaticChannel) {
            const int first = unit.kv_head * kHeadDim;
            zero = sum_of(WeightedQuery{x, p.k_zero + first}) * to_log2;
            uint4 *const scaled = query_operands(s, buffer, 1), *const lost = query_operands(s, buffer, kSplit ? 2 : 1);
            const Stored again = store_operands<kSplit>(scaled, lost, lane, tile, WeightedQuery{x, p.k_scale + first});
            coded = to_log2 / again.by;
            if (kAddsMiddle) zero += kMiddleCode * again.lost * coded;
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
