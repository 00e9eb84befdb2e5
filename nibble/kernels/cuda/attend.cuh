// Attention of one warp's eight query heads over one item: S = K q (tokens x heads), softmax, O += V^T P (channels x heads).
//
// Row g (+ 8 e) of token tile t of a coded item is its token 2 T g + 2 t + e (T: tiles of the item), so that a lane's
// tokens, and with them their scales, lie together. In an fp16 item it is token g + 8 e.
#pragma once
#include "query.cuh"
#include "state.cuh"

struct ItemContext {
    const DecodeParams& p;
    int kv_head;
    Shared* shared;
    int buffer;     // of the queries
    int head_tile;  // heads 8 head_tile .. + 7 of the group
    int lane;

    // This lane's query operands: raw, or with kStaticChannel times the scales (1), and what rounding those lost (2).
    DEVICE u32 queries(int set) const {
        return shared_address(query_operands(shared, buffer, set) + head_tile * kQueryChunks * 32 + lane);
    }
    DEVICE float4 factors(int h) const { return query_factors(shared, buffer)[head_tile * 8 + 2 * (lane & 3) + h]; }
};

// scores of tokens outside [token_begin, token_end) become minus infinity; token(tile, e) is the token of row g + 8 e.
template <int kTiles, class Token>
DEVICE void mask_scores(const ItemHeader& header, float (&scores)[kTiles][4], Token token) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int at = header.first_token + token(tile, e);
            if (at >= header.token_begin && at < header.token_end) continue;
            scores[tile][2 * e] = scores[tile][2 * e + 1] = -__int_as_float(0x7f800000);
        }
}
DEVICE bool needs_mask(const ItemHeader& header, int tokens) {
    return header.first_token < header.token_begin || header.first_token + tokens > header.token_end;
}

// Probabilities (tokens x heads accumulators) of one token tile as the B operand of P V.
DEVICE void to_operand(u32 (&b)[2], const float (&p)[4]) {
    b[0] = transpose8x8(pack_halves(p[0], p[1]));
    b[1] = transpose8x8(pack_halves(p[2], p[3]));
}

// This lane's piece of a row of channels, in operand order.
DEVICE uint4 load_chunk(u32 at, int chunk, int j) {
    if (chunk_channels(chunk) == 8) {
        const uint4 x = load_shared16(at + 2 * chunk_channel(chunk, j));
        return make_uint4(x.x, x.z, x.y, x.w);
    }
    const uint2 x = load_shared8(at + 2 * chunk_channel(chunk, j));
    return make_uint4(x.x, x.y, 0, 0);
}

// ---- fp16 items: K rows, then V rows ----
// An item of eight tokens leaves the rows g + 8 empty.
constexpr bool kHasUpperRows = kHalfItemTokens == 16;

DEVICE uint4 load_upper_chunk(u32 at, int chunk, int j) {
    return kHasUpperRows ? load_chunk(at, chunk, j) : make_uint4(0, 0, 0, 0);
}

DEVICE void attend_half(const ItemContext& x, const ItemHeader& header, u32 stage, RunningState& s) {
    const int g = x.lane / 4, j = x.lane & 3;
    float scores[1][4] = {};
    const u32 q = x.queries(0);
#pragma unroll
    for (int chunk = 0; chunk < kQueryChunks; ++chunk) {
        const bool whole = chunk_channels(chunk) == 8;
        const uint4 low = load_chunk(stage + g * kHalfRowBytes, chunk, j);
        const uint4 high = load_upper_chunk(stage + (g + 8) * kHalfRowBytes, chunk, j);
        const u32 first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
        const uint4 b = load_shared16(q + chunk * 512);
        mma(scores[0], first, b.x, b.y);
        if (whole) mma(scores[0], second, b.z, b.w);
    }
    const float f0 = x.factors(0).x, f1 = x.factors(1).x;
    scores[0][0] *= f0, scores[0][2] *= f0, scores[0][1] *= f1, scores[0][3] *= f1;
    const bool masked = needs_mask(header, kHalfItemTokens);
    if (masked) mask_scores<1>(header, scores, [&](int, int e) { return g + 8 * e; });
    if (!kHasUpperRows) scores[0][2] = scores[0][3] = -__int_as_float(0x7f800000);
    convert(x.p, x.kv_head, s, false, x.lane);
    softmax_step<1>(s, scores);
    u32 b[2];
    to_operand(b, scores[0]);

    // Rows behind the sequence's end hold whatever was there, NaN perhaps: their values are cleared, not weighted by 0.
    u32 keep[2] = {kFullMask, kFullMask};
    if (masked) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int left = header.token_end - header.first_token - 2 * j - 8 * half;
            keep[half] = left <= 0 ? 0u : left == 1 ? 0xffffu : kFullMask;
        }
    }
    const u32 values = stage + kHalfItemTokens * kHalfRowBytes;
#pragma unroll
    for (int chunk = 0; chunk < kQueryChunks; ++chunk) {
        const uint4 low = load_chunk(values + g * kHalfRowBytes, chunk, j);
        const uint4 high = load_upper_chunk(values + (g + 8) * kHalfRowBytes, chunk, j);
        const u32 rows[4] = {low.x, low.y, low.z, low.w}, later_rows[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
        for (int c = 2 * chunk; c < min(2 * chunk + 2, kChannelTiles); ++c) {
            const int word = 2 * (c & 1);
            const u32 a[4] = {transpose8x8(rows[word]) & keep[0], transpose8x8(rows[word + 1]) & keep[0],
                              transpose8x8(later_rows[word]) & keep[1], transpose8x8(later_rows[word + 1]) & keep[1]};
            mma(s.out[c], a, b[0], b[1]);
        }
    }
}

// ---- coded items: K codes, V codes, K parameters, V parameters ----
// Parameters of this lane's tokens of an item: halves [2 T], from `at`, the item's part of a page's 64.
DEVICE void load_token_parameters(float (&y)[2 * kTokenTiles], u32 at, int g) {
    u32 pairs[kTokenTiles];
    if constexpr (kTokenTiles == 4) {
        const uint4 x = load_shared16(at + 16 * g);
        pairs[0] = x.x, pairs[1] = x.y, pairs[2] = x.z, pairs[3] = x.w;
    } else if constexpr (kTokenTiles == 2) {
        const uint2 x = load_shared8(at + 8 * g);
        pairs[0] = x.x, pairs[1] = x.y;
    } else {
        pairs[0] = load_shared4(at + 4 * g);
    }
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) y[2 * t] = half_low(pairs[t]), y[2 * t + 1] = half_high(pairs[t]);
}

DEVICE uint4 multiply_chunk(uint4 a, uint4 b) {
    return make_uint4(multiply_halves(a.x, b.x), multiply_halves(a.y, b.y), multiply_halves(a.z, b.z),
                      multiply_halves(a.w, b.w));
}

DEVICE uint4 chunk_rounding_error(uint4 a, uint4 b, uint4 product) {
    return make_uint4(rounding_error(a.x, b.x, product.x), rounding_error(a.y, b.y, product.y),
                      rounding_error(a.z, b.z, product.z), rounding_error(a.w, b.w, product.w));
}

// scores: sums over channels of codes times scaled queries.
// A query times a scale does not fit fp16: with kSplit, what its rounding lost is multiplied as well.
constexpr bool kSplit = kKScale == kPageChannel || kKScale == kStaticChannel;

DEVICE void multiply_keys(const ItemContext& x, u32 stage, u32 parameters,
                          float (&scores)[kTokenTiles][4], float (&zero)[2]) {
    using Reader = CodeReader<kKBits, kTokenTiles * kChannelTiles>;
    const int j = x.lane & 3;
    const u32 q = x.queries(kKScale == kStaticChannel), q_lost = x.queries(2);
    float even_zero[4] = {}, odd_zero[4] = {};
    uint4 b, lost;
    // With two tiles of tokens, chains of products that add to the same sum would be what an item takes: the lost part has
    // sums of its own.
    constexpr bool kApart = kSplit && kTokenTiles < 4;
    float apart[kApart ? kTokenTiles : 1][4] = {};
    const auto lost_sum = [&](int token_tile) -> float(&)[4] { return kApart ? apart[token_tile] : scores[token_tile]; };
    u32 words[Reader::kLoadWords];
#pragma unroll
    for (int tile = 0; tile < kTokenTiles * kChannelTiles; ++tile) {
        const int channel_tile = tile / kTokenTiles, token_tile = tile % kTokenTiles;
        const int chunk = channel_tile / 2;
        if (channel_tile % 2 == 0 && token_tile == 0) {
            b = load_shared16(q + chunk * 512);
            if (kKScale == kStaticChannel) lost = load_shared16(q_lost + chunk * 512);
            if (kKScale == kPageChannel) {
                const uint4 scale = load_chunk(parameters, chunk, j);
                const uint4 z = load_chunk(parameters + 2 * kHeadDim, chunk, j);
                // As it was loaded: rows g hold the even tile's zero points, rows g + 8 the odd one's.
                const u32 zeros[4] = {z.x, z.z, z.y, z.w};
                mma(even_zero, zeros, b.x, b.y);
                if (chunk_channels(chunk) == 8) mma(odd_zero, zeros, b.z, b.w);
                const uint4 product = multiply_chunk(b, scale);
                lost = chunk_rounding_error(b, scale, product);
                b = product;
            }
        }
        if (tile % Reader::kLoadTiles == 0) Reader::load(words, stage, tile / Reader::kLoadTiles, x.lane);
        u32 a[4];
        Reader::unpack(a, words, tile % Reader::kLoadTiles);
        if (channel_tile % 2 == 0) {
            mma(scores[token_tile], a, b.x, b.y);
            if (kSplit) mma(lost_sum(token_tile), a, lost.x, lost.y);
        } else {
            mma(scores[token_tile], a, b.z, b.w);
            if (kSplit) mma(lost_sum(token_tile), a, lost.z, lost.w);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) zero[h] = even_zero[h] + odd_zero[2 + h];
    if constexpr (kApart) {
#pragma unroll
        for (int i = 0; i < 4 * kTokenTiles; ++i) scores[i / 4][i % 4] += apart[i / 4][i % 4];
    }
}

// From products with codes to scores in log2 units.
DEVICE void scale_scores(const ItemContext& x, u32 token_parameters, float (&scores)[kTokenTiles][4],
                         const float (&zero)[2]) {
    const int g = x.lane / 4;
    float token_scale[2 * kTokenTiles], token_zero[2 * kTokenTiles];
    if (kKScale == kToken) {
        load_token_parameters(token_scale, token_parameters, g);
        load_token_parameters(token_zero, token_parameters + 2 * kPageTokens, g);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float4 f = x.factors(h);
        const float upper = f.y * upper_row_unit<kKBits>();
        const float plus = kKScale == kPageChannel ? zero[h] * f.x : f.z;
#pragma unroll
        for (int i = 0; i < 2 * kTokenTiles; ++i) {
            float& score = scores[i / 2][2 * (i & 1) + h];
            const float by = i & 1 ? upper : f.y;
            score = kKScale == kToken ? score * (by * token_scale[i]) + plus * token_zero[i] : score * by + plus;
        }
    }
}

DEVICE void attend_coded(const ItemContext& x, const ItemHeader& header, u32 stage, RunningState& s) {
    const int g = x.lane / 4;
    const int place_in_page = kItemsPerPage == 1 ? 0 : header.first_token & (kPageTokens - 1);
    const u32 k_parameters = stage + kKItemBytes + kVItemBytes;
    float scores[kTokenTiles][4] = {};
    float zero[2];
    multiply_keys(x, stage, k_parameters, scores, zero);
    scale_scores(x, k_parameters + 2 * place_in_page, scores, zero);
    if (needs_mask(header, kItemTokens))
        mask_scores<kTokenTiles>(header, scores, [&](int tile, int e) { return 2 * kTokenTiles * g + 2 * tile + e; });
    convert(x.p, x.kv_head, s, true, x.lane);
    softmax_step<kTokenTiles>(s, scores);

    constexpr bool kScaledByToken = kVScale == kToken;
    float token_scale[2 * kTokenTiles], token_zero[2 * kTokenTiles];
    if (kScaledByToken) {
        const u32 v_parameters = k_parameters + kKParameterBytes + 2 * place_in_page;
        load_token_parameters(token_scale, v_parameters, g);
        load_token_parameters(token_zero, v_parameters + 2 * kPageTokens, g);
    }
    u32 b[kTokenTiles][2];
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
        float(&p)[4] = scores[tile];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            s.zero[i & 1] += kScaledByToken ? p[i] * token_zero[2 * tile + i / 2] : p[i];
            if (kScaledByToken) p[i] *= token_scale[2 * tile + i / 2];
        }
        to_operand(b[tile], p);
    }
    using Reader = CodeReader<kVBits, kTokenTiles * kChannelTiles>;
    u32 words[Reader::kLoadWords];
#pragma unroll
    for (int tile = 0; tile < kTokenTiles * kChannelTiles; ++tile) {
        if (tile % Reader::kLoadTiles == 0)
            Reader::load(words, stage + kKItemBytes, tile / Reader::kLoadTiles, x.lane);
        u32 a[4];
        Reader::unpack(a, words, tile % Reader::kLoadTiles);
        const int token_tile = tile / kChannelTiles, channel_tile = tile % kChannelTiles;
        mma(s.out[channel_tile], a, b[token_tile][0], b[token_tile][1]);
    }
}
