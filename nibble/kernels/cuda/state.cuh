// What a consumer warp carries from item to item: the running maximum, sum and output of its eight query heads.
//
// out[channel tile] is a tensor-core accumulator: rows are channels, columns are heads. While the warp reads codes it is in
// units of codes (and of the static scale of a channel); `convert` moves between those and real units.
#pragma once
#include "operands.cuh"
#include "result.cuh"
#include "shared.cuh"

struct RunningState {
    float out[kChannelTiles][4];
    float largest[2];   // of heads 2j, 2j+1, in log2 units
    float sum[2];       // of this lane's tokens only
    float zero[2];      // sum of p * zero point (static: of p) over this lane's coded tokens
    bool is_coded;

    DEVICE void reset() {
#pragma unroll
        for (int c = 0; c < kChannelTiles; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) out[c][i] = 0;
#pragma unroll
        for (int h = 0; h < 2; ++h) largest[h] = kLowest, sum[h] = 0, zero[h] = 0;
        is_coded = false;
    }
};

DEVICE float sum_over_rows(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(kFullMask, x, step);
    return x;
}

DEVICE void scale_out(RunningState& s, float lower, float upper) {
#pragma unroll
    for (int c = 0; c < kChannelTiles; ++c) {
        s.out[c][0] *= lower, s.out[c][1] *= lower;
        s.out[c][2] *= upper, s.out[c][3] *= upper;
    }
}

// Static V: out * scale + zero * (sum of p) leaving codes, out / scale entering them.
DEVICE void apply_static_values(const DecodeParams& p, int kv_head, RunningState& s, bool entering, int lane) {
    float weight[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        weight[h] = entering ? 0.0f : sum_over_rows(s.zero[h]);
        s.zero[h] = 0;
    }
#pragma unroll
    for (int c = 0; c < kChannelTiles; ++c)
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const int channel = kv_head * kHeadDim + value_channel(c, lane / 4, row);
            const float scale = p.v_scale[channel], zero = p.v_zero[channel];
            const float by = entering ? 1.0f / scale : scale;
#pragma unroll
            for (int h = 0; h < 2; ++h) s.out[c][2 * row + h] = s.out[c][2 * row + h] * by + zero * weight[h];
        }
}

DEVICE void convert(const DecodeParams& p, int kv_head, RunningState& s, bool to_coded, int lane) {
    if (!kCoded || s.is_coded == to_coded) return;
    s.is_coded = to_coded;
    constexpr float kUpper = upper_row_unit<kVBits>();
    if (!to_coded) scale_out(s, kCodeUnit, kCodeUnit * kUpper);
    if constexpr (kVScale == kStaticChannel) apply_static_values(p, kv_head, s, to_coded, lane);
    if (to_coded) scale_out(s, 1.0f / kCodeUnit, 1.0f / (kCodeUnit * kUpper));
}

// How far, in log2 units, scores may lie above the state's reference before that is moved: a probability is at most 4 then,
// which times any scale of V (at most 131008 / 15) fits fp16.
constexpr float kSlack = 2;

// One step of the online softmax: scores (log2 units) become probabilities relative to the state's reference.
template <int kTiles>
DEVICE void softmax_step(RunningState& s, float (&scores)[kTiles][4]) {
    float reference[2];
    bool moves = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float largest = fmaxf(scores[0][h], scores[0][2 + h]);
#pragma unroll
        for (int tile = 1; tile < kTiles; ++tile) largest = fmaxf(largest, fmaxf(scores[tile][h], scores[tile][2 + h]));
#pragma unroll
        for (int step = 4; step < 32; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, step));
        reference[h] = largest > s.largest[h] + kSlack ? largest : s.largest[h];
        moves |= reference[h] != s.largest[h];
    }
    if (__any_sync(kFullMask, moves)) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float by = exp2_fast(s.largest[h] - reference[h]);
            s.largest[h] = reference[h];
            s.sum[h] *= by, s.zero[h] *= by;
#pragma unroll
            for (int c = 0; c < kChannelTiles; ++c) s.out[c][h] *= by, s.out[c][2 + h] *= by;
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                float& x = scores[tile][2 * row + h];
                x = exp2_fast(x - s.largest[h]);
                s.sum[h] += x;
            }
}
