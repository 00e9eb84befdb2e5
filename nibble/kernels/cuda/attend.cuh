// Attention of one consumer warp over one item, for all query heads of a group: S = K q, softmax, O += V^T P.
//
// Row r (+ 8 half) of token tile t of a coded item is its token 2 T r + 2 t + half (T: tiles of the item), so that a lane's
// tokens, and with them their scales, lie together. In an fp16 item it is token r + 8 half.
#pragma once
#include "query.cuh"
#include "state.cuh"

struct ItemContext {
    const DecodeParams& p;
    int kv_head;
    Shared* shared;
    int buffer;  // of the queries
    int lane;

    // This lane's query operands: raw, or with kStaticChannel times the scales (1), and what rounding those lost (2).
    DEVICE u32 queries(int set) const { return shared_address(query_operands(shared, buffer, set) + lane); }
    DEVICE float4 factors(int h) const { return query_factors(shared, buffer)[head_of(lane, h)]; }
};

// A lane's piece of the queries of all heads: the operands of two channel tiles.
struct QueryChunk {
    uint4 parts[kHeadTiles];

    DEVICE static QueryChunk load(u32 queries, int chunk) {
        QueryChunk q;
#pragma unroll
        for (int i = 0; i < kHeadTiles; ++i) q.parts[i] = load_shared16(queries + (i * kQueryChunks + chunk) * 512);
        return q;
    }
    DEVICE void operand(HeadOperand& b, bool odd) const {
        const uint4 x = parts[kHeadsAreRows && odd];
        if constexpr (kHeadsAreRows)
            b[0] = x.x, b[1] = x.y, b[2] = x.z, b[3] = x.w;
        else
            b[0] = odd ? x.z : x.x, b[1] = odd ? x.w : x.y;
    }
};

// scores of tokens outside [token_begin, token_end) become minus infinity; token(tile, half, i) is the token of a row.
template <int kTiles, class Token>
DEVICE void mask_scores(const ItemHeader& header, Product (&scores)[kTiles], Token token) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < kLaneRows; ++i) {
                const int at = header.first_token + token(tile, half, i);
                if (at >= header.token_begin && at < header.token_end) continue;
#pragma unroll
                for (int h = 0; h < 2; ++h) scores[tile].at(half, h, i) = -__int_as_float(0x7f800000);
            }
}
DEVICE bool needs_mask(const ItemHeader& header, int tokens) {
    return header.first_token < header.token_begin || header.first_token + tokens > header.token_end;
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
    Product scores[1];
    scores[0].clear();
    const u32 queries = x.queries(0);
#pragma unroll
    for (int chunk = 0; chunk < kQueryChunks; ++chunk) {
        const uint4 low = load_chunk(stage + g * kHalfRowBytes, chunk, j);
        const uint4 high = load_upper_chunk(stage + (g + 8) * kHalfRowBytes, chunk, j);
        const u32 first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
        const QueryChunk q = QueryChunk::load(queries, chunk);
        HeadOperand b;
        q.operand(b, false);
        multiply(scores[0], first, b);
        if (chunk_channels(chunk) < 8) continue;
        q.operand(b, true);
        multiply(scores[0], second, b);
    }
    ScoreUnits units[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) units[h].lower = units[h].upper = x.factors(h).x, units[h].plus = 0;
    const bool masked = needs_mask(header, kHalfItemTokens);
    const int row = first_row(x.lane);
    if (masked) mask_scores<1>(header, scores, [&](int, int half, int i) { return row + i + 8 * half; });
    if (!kHasUpperRows) {
#pragma unroll
        for (int i = 0; i < 2 * kLaneRows; ++i) scores[0].at(1, i & 1, i / 2) = -__int_as_float(0x7f800000);
    }
    convert(x.p, x.kv_head, s, false, x.lane);
    softmax_step<1>(s, scores, units);
    HeadOperand b;
    to_operand(b, scores[0]);
    s.sums.add(b, 0, 0, x.lane);

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
            multiply(s.out[c], a, b);
        }
    }
}

// ---- coded items: K codes, V codes, K parameters, V parameters ----
// Parameters of a row's tokens of an item: halves that lie together behind `at`, the item's part of a page's 64.
DEVICE void load_row_parameters(u32 (&pairs)[kTokenTiles], u32 at, int row) {
    at += 4 * kTokenTiles * row;
    if constexpr (kTokenTiles == 4) {
        const uint4 x = load_shared16(at);
        pairs[0] = x.x, pairs[1] = x.y, pairs[2] = x.z, pairs[3] = x.w;
    } else if constexpr (kTokenTiles == 2) {
        const uint2 x = load_shared8(at);
        pairs[0] = x.x, pairs[1] = x.y;
    } else {
        pairs[0] = load_shared4(at);
    }
}

// The same of a lane's rows of a contraction over tokens, 2j and 2j + 1: pairs for the lower and upper half of every tile.
struct ContractionParameters {
    u32 pairs[kTokenTiles][2];

    DEVICE ContractionParameters(u32 at, int j) {
        u32 even[kTokenTiles], odd[kTokenTiles];
        load_row_parameters(even, at, 2 * j);
        load_row_parameters(odd, at, 2 * j + 1);
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
            pairs[t][0] = __byte_perm(even[t], odd[t], 0x5410);
            pairs[t][1] = __byte_perm(even[t], odd[t], 0x7632);
        }
    }
};

// q times a piece of a row of channels, and what rounding that lost.
DEVICE void multiply_by_channels(QueryChunk& product, QueryChunk& lost, const QueryChunk& q, uint4 by) {
    const auto multiply = [](u32& y, u32& rest, u32 a, u32 b) {
        y = multiply_halves(a, b);
        rest = rounding_error(a, b, y);
    };
#pragma unroll
    for (int i = 0; i < kHeadTiles; ++i) {
        const uint4 a = q.parts[i];
        uint4 &y = product.parts[i], &rest = lost.parts[i];
        const u32 low = i == 0 ? by.x : by.z, high = i == 0 ? by.y : by.w;
        multiply(y.x, rest.x, a.x, low);
        multiply(y.y, rest.y, a.y, kHeadsAreRows ? low : high);
        multiply(y.z, rest.z, a.z, kHeadsAreRows ? high : by.z);
        multiply(y.w, rest.w, a.w, kHeadsAreRows ? high : by.w);
    }
}

// Sums over channels: of queries times the zero points of a page and, with kAddsMiddle, of what rounding queries times scales
// lost.
struct ChannelSums {
    float even[4] = {}, odd[4] = {};
    float rounded[4] = {};

    // Eight heads: as z was loaded, rows g hold the even channel tile's numbers, rows g + 8 the odd one's. Sixteen heads: z are
    // columns, of zero points for even g and of scales for odd g.
    DEVICE void add(const QueryChunk& q, uint4 z, bool whole) {
        HeadOperand b;
        q.operand(b, false);
        const u32 rows[4] = {z.x, z.z, z.y, z.w};
        if (kHeadsAreRows)
            mma(even, b, z.x, z.y);
        else
            mma(even, rows, b[0], b[1]);
        if (!whole) return;
        q.operand(b, true);
        if (kHeadsAreRows)
            mma(odd, b, z.z, z.w);
        else
            mma(odd, rows, b[0], b[1]);
    }
    DEVICE void add_rounded(const QueryChunk& product, bool whole) {
        HeadOperand b;
        product.operand(b, false);
        mma(rounded, b, kOnes, kOnes);
        if (!whole) return;
        product.operand(b, true);
        mma(rounded, b, kOnes, kOnes);
    }
    // Of the lane's head h: what is the same for all tokens.
    DEVICE float of(int h) const {
        if (!kHeadsAreRows) return even[h] + odd[2 + h];
        const float zeros = even[2 * h] + odd[2 * h];
        if (!kAddsMiddle) return zeros;
        return zeros + kMiddleCode * (even[2 * h + 1] + odd[2 * h + 1] - rounded[2 * h]);
    }
};

DEVICE void multiply_keys(const ItemContext& x, u32 stage, u32 parameters, Product (&scores)[kTokenTiles],
                          float (&zero)[2]) {
    using Reader = CodeReader<kKBits, kTokenTiles * kChannelTiles>;
    const int j = x.lane & 3;
    const u32 queries = x.queries(kKScale == kStaticChannel), lost_queries = x.queries(2);
    const u32 zero_points = parameters + (kScaledByPage && kAddsMiddle && x.lane & 4 ? 0 : 2 * kHeadDim);
    ChannelSums sums;
    QueryChunk q, lost;
    // With two tiles of tokens, chains of products that add to the same sum would be what an item takes: the lost part has
    // sums of its own.
    constexpr bool kApart = kSplit && kTokenTiles < 4;
    Product apart[kApart ? kTokenTiles : 1];
#pragma unroll
    for (int t = 0; t < (kApart ? kTokenTiles : 1); ++t) apart[t].clear();
    u32 words[Reader::kLoadWords];
#pragma unroll
    for (int tile = 0; tile < kTokenTiles * kChannelTiles; ++tile) {
        const int channel_tile = tile / kTokenTiles, token_tile = tile % kTokenTiles;
        const int chunk = channel_tile / 2;
        if (channel_tile % 2 == 0 && token_tile == 0) {
            q = QueryChunk::load(queries, chunk);
            if (kKScale == kStaticChannel && kSplit) lost = QueryChunk::load(lost_queries, chunk);
            if (kScaledByPage) {
                const bool whole = chunk_channels(chunk) == 8;
                const uint4 scale = load_chunk(parameters, chunk, j);
                sums.add(q, load_chunk(zero_points, chunk, j), whole);
                const QueryChunk raw = q;
                multiply_by_channels(q, lost, raw, scale);
                if (kAddsMiddle) sums.add_rounded(q, whole);
            }
        }
        if (tile % Reader::kLoadTiles == 0) Reader::load(words, stage, tile / Reader::kLoadTiles, x.lane);
        u32 a[4];
        Reader::unpack(a, words, tile % Reader::kLoadTiles);
        HeadOperand b;
        q.operand(b, channel_tile % 2);
        multiply(scores[token_tile], a, b);
        if constexpr (kSplit) {
            lost.operand(b, channel_tile % 2);
            multiply(kApart ? apart[token_tile] : scores[token_tile], a, b);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) zero[h] = sums.of(h);
    if constexpr (kApart) {
#pragma unroll
        for (int i = 0; i < 4 * kTokenTiles; ++i) scores[i / 4].d[0][i % 4] += apart[i / 4].d[0][i % 4];
    }
}

// Products with codes, in units that are the same for all tokens of a half.
DEVICE void find_units(const ItemContext& x, u32 token_parameters, Product (&scores)[kTokenTiles], const float (&zero)[2],
                       ScoreUnits (&units)[2]) {
    constexpr float kUpper = kKBits == 4 ? 1.0f / 16 : 1.0f;
    float scale[kLaneRows][2 * kTokenTiles], token_zero[kLaneRows][2 * kTokenTiles];
    if (kKScale == kToken) {
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) {
            u32 scales[kTokenTiles], zeros[kTokenTiles];
            load_row_parameters(scales, token_parameters, first_row(x.lane) + i);
            load_row_parameters(zeros, token_parameters + 2 * kPageTokens, first_row(x.lane) + i);
#pragma unroll
            for (int t = 0; t < kTokenTiles; ++t) {
                scale[i][2 * t] = half_low(scales[t]), scale[i][2 * t + 1] = half_high(scales[t]);
                token_zero[i][2 * t] = half_low(zeros[t]), token_zero[i][2 * t + 1] = half_high(zeros[t]);
            }
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float4 f = x.factors(h);
        units[h].lower = f.y, units[h].upper = f.y * kUpper;
        units[h].plus = kKScale == kPageChannel ? zero[h] * f.x : f.z;
#pragma unroll
        for (int row = 0; row < kTokenTiles * kLaneRows; ++row) {
            const int t = row % kTokenTiles, i = row / kTokenTiles;
            float &lower = scores[t].at(0, h, i), &upper = scores[t].at(1, h, i);
            if (kKBits == 4) upper -= lower;
            if (kKScale != kToken) continue;
            lower = lower * (f.y * scale[i][2 * t]) + f.z * token_zero[i][2 * t];
            upper = upper * (f.y * kUpper * scale[i][2 * t + 1]) + f.z * token_zero[i][2 * t + 1];
        }
        if (kKScale == kToken) units[h].lower = units[h].upper = 1, units[h].plus = 0;
    }
}

// Probabilities times V's scales, and the sums of probabilities and of those times its zero points.
DEVICE void weigh_by_values(RunningState& s, HeadOperand (&b)[kTokenTiles], u32 parameters, int lane) {
    if constexpr (kVScale == kToken) {
        const ContractionParameters zeros(parameters + 2 * kPageTokens, lane & 3), scales(parameters, lane & 3);
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
            s.sums.add(b[t], zeros.pairs[t][0], zeros.pairs[t][1], lane);
#pragma unroll
            for (int i = 0; i < 2 * kHeadTiles; ++i) b[t][i] = multiply_halves(b[t][i], scales.pairs[t][i / kHeadTiles]);
        }
    } else {
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) s.sums.add(b[t], kOnes, kOnes, lane);
    }
}

DEVICE void attend_coded(const ItemContext& x, const ItemHeader& header, u32 stage, RunningState& s) {
    const int place_in_page = kItemsPerPage == 1 ? 0 : header.first_token & (kPageTokens - 1);
    const u32 k_parameters = stage + kKItemBytes + kVItemBytes;
    Product scores[kTokenTiles];
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) scores[t].clear();
    float zero[2];
    multiply_keys(x, stage, k_parameters, scores, zero);
    ScoreUnits units[2];
    find_units(x, k_parameters + 2 * place_in_page, scores, zero, units);
    const int row = first_row(x.lane);
    if (needs_mask(header, kItemTokens))
        mask_scores<kTokenTiles>(header, scores, [&](int tile, int half, int i) {
            return 2 * kTokenTiles * (row + i) + 2 * tile + half;
        });
    convert(x.p, x.kv_head, s, true, x.lane);
    softmax_step<kTokenTiles>(s, scores, units);
    HeadOperand b[kTokenTiles];
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) to_operand(b[tile], scores[tile]);
    weigh_by_values(s, b, k_parameters + kKParameterBytes + 2 * place_in_page, x.lane);
    using Reader = CodeReader<kVBits, kTokenTiles * kChannelTiles>;
    u32 words[Reader::kLoadWords];
#pragma unroll
    for (int tile = 0; tile < kTokenTiles * kChannelTiles; ++tile) {
        if (tile % Reader::kLoadTiles == 0)
            Reader::load(words, stage + kKItemBytes, tile / Reader::kLoadTiles, x.lane);
        u32 a[4];
        Reader::unpack(a, words, tile % Reader::kLoadTiles);
        multiply(s.out[tile % kChannelTiles], a, b[tile / kChannelTiles]);
    }
}
