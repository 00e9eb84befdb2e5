// What a consumer warp carries from item to item: the running maximum, sum and output of its queries.
//
// out[tile][channel tile] is a tensor-core accumulator: rows are channels, columns are heads. While the warp reads codes it
// is in units of codes (and of the static scale of a channel); `convert` moves between those and real units.
#pragma once
#include "operands.cuh"
#include "result.cuh"
#include "shared.cuh"

struct RunningState {
    float out[kHeadTiles][kChannelTiles][4];
    float largest[kHeadTiles][2];   // of heads 2j, 2j+1, in log2 units
    float sum[kHeadTiles][2];       // of this lane's tokens only
    float zero[kHeadTiles][2];      // sum of p * zero point (static: of p) over this lane's coded tokens
    bool is_coded;

    DEVICE void reset() {
#pragma unroll
        for (int t = 0; t < kHeadTiles; ++t) {
#pragma unroll
            for (int c = 0; c < kChannelTiles; ++c)
#pragma unroll
                for (int i = 0; i < 4; ++i) out[t][c][i] = 0;
#pragma unroll
            for (int h = 0; h < 2; ++h) largest[t][h] = kLowest, sum[t][h] = 0, zero[t][h] = 0;
        }
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
    for (int t = 0; t < kHeadTiles; ++t)
#pragma unroll
        for (int c = 0; c < kChannelTiles; ++c) {
            s.out[t][c][0] *= lower, s.out[t][c][1] *= lower;
            s.out[t][c][2] *= upper, s.out[t][c][3] *= upper;
        }
}

// Static V: out * scale + zero * (sum of p) leaving codes, out / scale entering them.
DEVICE void apply_static_values(const DecodeParams& p, int kv_head, RunningState& s, bool entering, int lane) {
    float weight[kHeadTiles][2];
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            weight[t][h] = entering ? 0.0f : sum_over_rows(s.zero[t][h]);
            s.zero[t][h] = 0;
        }
#pragma unroll
    for (int c = 0; c < kChannelTiles; ++c)
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const int channel = kv_head * kHeadDim + value_channel(c, lane / 4, row);
            const float scale = p.v_scale[channel], zero = p.v_zero[channel];
            const float by = entering ? 1.0f / scale : scale;
#pragma unroll
            for (int t = 0; t < kHeadTiles; ++t)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float& x = s.out[t][c][2 * row + h];
                    x = x * by + zero * weight[t][h];
                }
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

// One step of the online softmax: scores (log2 units) become probabilities; the state is rescaled to the new maximum.
template <int kTiles>
DEVICE void softmax_step(RunningState& s, float (&scores)[kHeadTiles][kTiles][4]) {
    float by[kHeadTiles][2];
    bool changed = false;
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float largest = s.largest[t][h];
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile)
                largest = fmaxf(largest, fmaxf(scores[t][tile][h], scores[t][tile][2 + h]));
#pragma unroll
            for (int step = 4; step < 32; step *= 2)
                largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, step));
            by[t][h] = exp2_fast(s.largest[t][h] - largest);
            changed |= largest != s.largest[t][h];
            s.largest[t][h] = largest;
            float sum = 0;
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    float& x = scores[t][tile][2 * row + h];
                    x = exp2_fast(x - largest);
                    sum += x;
                }
            s.sum[t][h] = s.sum[t][h] * by[t][h] + sum;
        }
    if (!__any_sync(kFullMask, changed)) return;
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            s.zero[t][h] *= by[t][h];
#pragma unroll
            for (int c = 0; c < kChannelTiles; ++c) s.out[t][c][h] *= by[t][h], s.out[t][c][2 + h] *= by[t][h];
        }
}
