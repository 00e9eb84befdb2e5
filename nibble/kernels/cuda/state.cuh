// What a consumer warp carries from item to item: the running maximum, sum and output of a group's query heads.
//
// out[channel tile] is a product of channels by heads. While the warp reads codes it is in units of codes (and of the static
// scale of a channel); `convert` moves between those and real units.
#pragma once
#include "heads.cuh"
#include "operands.cuh"
#include "result.cuh"
#include "shared.cuh"

struct RunningState {
    Product out[kChannelTiles];
    float largest[2];  // of the lane's heads, in log2 units
    TokenSums sums;    // of p, and of p * zero point (static: of p) over coded tokens
    bool is_coded;

    DEVICE void reset() {
#pragma unroll
        for (int c = 0; c < kChannelTiles; ++c) out[c].clear();
#pragma unroll
        for (int h = 0; h < 2; ++h) largest[h] = kLowest;
        sums.clear();
        is_coded = false;
    }
};

// From units of codes to real ones and back. The upper rows of 4-bit tiles hold codes of the lower ones and 16 of their own.
constexpr float kUpperUnit = kVBits == 4 ? 16 : 1;
DEVICE void leave_code_units(RunningState& s) {
#pragma unroll
    for (int c = 0; c < kChannelTiles; ++c)
#pragma unroll
        for (int i = 0; i < 2 * kLaneRows; ++i) {
            float &lower = s.out[c].at(0, i & 1, i / 2), &upper = s.out[c].at(1, i & 1, i / 2);
            if (kVBits == 4) upper -= lower;
            lower *= kCodeUnit, upper *= kCodeUnit / kUpperUnit;
        }
}
DEVICE void enter_code_units(RunningState& s) {
#pragma unroll
    for (int c = 0; c < kChannelTiles; ++c)
#pragma unroll
        for (int i = 0; i < 2 * kLaneRows; ++i) {
            float &lower = s.out[c].at(0, i & 1, i / 2), &upper = s.out[c].at(1, i & 1, i / 2);
            lower *= 1 / kCodeUnit, upper *= kUpperUnit / kCodeUnit;
            if (kVBits == 4) upper += lower;
        }
}

// Static V: out * scale + zero * (sum of p) leaving codes, out / scale entering them.
DEVICE void apply_static_values(const DecodeParams& p, int kv_head, RunningState& s, bool entering, int lane) {
    float weight[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) weight[h] = entering ? 0.0f : s.sums.numbers(h, lane);
    s.sums.clear_numbers(lane);
#pragma unroll
    for (int c = 0; c < kChannelTiles; ++c)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < kLaneRows; ++i) {
                const int channel = kv_head * kHeadDim + value_channel(c, first_row(lane) + i, half);
                const float scale = p.v_scale[channel], zero = p.v_zero[channel];
                const float by = entering ? 1.0f / scale : scale;
#pragma unroll
                for (int h = 0; h < 2; ++h) s.out[c].at(half, h, i) = s.out[c].at(half, h, i) * by + zero * weight[h];
            }
}

DEVICE void convert(const DecodeParams& p, int kv_head, RunningState& s, bool to_coded, int lane) {
    if (!kCoded || s.is_coded == to_coded) return;
    s.is_coded = to_coded;
    if (!to_coded) leave_code_units(s);
    if constexpr (kVScale == kStaticChannel) apply_static_values(p, kv_head, s, to_coded, lane);
    if (to_coded) enter_code_units(s);
}

// How far, in log2 units, scores may lie above the state's reference before that is moved: a probability is at most 4 then,
// which times any scale of V (at most 131008 / 15) fits fp16.
constexpr float kSlack = 2;

// What turns products into scores in log2 units: times lower or upper, by the half of the tile, plus.
struct ScoreUnits {
    float lower;
    float upper;
    float plus;
};

// One step of the online softmax: products become probabilities relative to the state's reference.
template <int kTiles>
DEVICE void softmax_step(RunningState& s, Product (&scores)[kTiles], const ScoreUnits (&units)[2]) {
    float largest[2];
    bool moves = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float lower = scores[0].at(0, h, 0), upper = scores[0].at(1, h, 0);
#pragma unroll
        for (int i = 1; i < kTiles * kLaneRows; ++i) {
            lower = fmaxf(lower, scores[i % kTiles].at(0, h, i / kTiles));
            upper = fmaxf(upper, scores[i % kTiles].at(1, h, i / kTiles));
        }
        largest[h] = fmaxf(lower * units[h].lower, upper * units[h].upper) + units[h].plus;
        moves |= largest[h] > s.largest[h] + kSlack;
    }
    if (__any_sync(kFullMask, moves)) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float all = max_over_rows(largest[h]), reference = all > s.largest[h] + kSlack ? all : s.largest[h];
            const float by = exp2_fast(s.largest[h] - reference);
            s.largest[h] = reference;
            s.sums.scale(h, by);
#pragma unroll
            for (int c = 0; c < kChannelTiles; ++c)
#pragma unroll
                for (int i = 0; i < 2 * kLaneRows; ++i) s.out[c].at(i & 1, h, i / 2) *= by;
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float plus = units[h].plus - s.largest[h];
#pragma unroll
        for (int i = 0; i < kTiles * kLaneRows; ++i) {
            float &lower = scores[i % kTiles].at(0, h, i / kTiles), &upper = scores[i % kTiles].at(1, h, i / kTiles);
            lower = exp2_fast(__fmaf_rn(lower, units[h].lower, plus));
            upper = exp2_fast(__fmaf_rn(upper, units[h].upper, plus));
        }
    }
}
