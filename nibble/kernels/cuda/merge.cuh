// The end of a unit: the consumers' states become one result, the final one when the sequence has a single split.
//
// Thread i owns the outputs i, i + threads, ...: four channels of a head each, in tile order. The order of every sum is
// fixed.
#pragma once
#include "result.cuh"
#include "state.cuh"

DEVICE void store_state(const Carved& c, int warp, int lane, const RunningState& s) {
    const int g = lane / 4, j = lane & 3;
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int head = t * 8 + 2 * j + h;
            float* row = c.merge_out + (warp * kHeadSlots + head) * kMergeStride;
#pragma unroll
            for (int tile = 0; tile < kChannelTiles; ++tile) {
                row[tile * 16 + g] = s.out[t][tile][h];
                row[tile * 16 + g + 8] = s.out[t][tile][2 + h];
            }
            const float sum = sum_over_rows(s.sum[t][h]), zero = sum_over_rows(s.zero[t][h]);
            if (g == 0) {
                float* state = c.fixed->merge_state[warp][head];
                state[0] = s.largest[t][h], state[1] = sum, state[2] = zero;
            }
        }
}

DEVICE Merged merge_warps(const Carved& c, int warps, int head, int quad) {
    float largest = kLowest;
    for (int w = 0; w < warps; ++w) largest = fmaxf(largest, c.fixed->merge_state[w][head][0]);
    float4 total = make_float4(0, 0, 0, 0);
    float sum = 0;
#pragma unroll 4
    for (int w = 0; w < warps; ++w) {
        const float4 state = *reinterpret_cast<const float4*>(c.fixed->merge_state[w][head]);
        const float by = exp2_fast(state.x - largest);
        const float* row = c.merge_out + (w * kHeadSlots + head) * kMergeStride + quad * 4;
        const float4 out = *reinterpret_cast<const float4*>(row);
        total = sum_of(total, scaled(sum_of(out, make_float4(state.z, state.z, state.z, state.z)), by));
        sum += state.y * by;
    }
    if (sum == 0) return {make_float4(0, 0, 0, 0), -__int_as_float(0x7f800000)};
    return {scaled(total, 1.0f / sum), largest + log2_fast(sum)};
}

DEVICE void finish_unit(const DecodeParams& p, const Carved& c, const Unit& unit, int warp, int lane,
                        const RunningState& s) {
    const int threads = p.consumers * 32, outputs = p.group * kQuads;
    consumers_sync(threads);  // everybody has read the previous unit's states
    store_state(c, warp, lane, s);
    consumers_sync(threads);
    const long long place = (static_cast<long long>(unit.batch) * p.kv_heads + unit.kv_head) * p.max_splits + unit.split;
    for (int i = warp * 32 + lane; i < outputs; i += threads) {
        const int head = i / kQuads, quad = i - head * kQuads;
        const Merged m = merge_warps(c, p.consumers, head, quad);
        if (unit.num_splits == 1) {
            store_result(p, unit.batch, unit.kv_head, head, quad, m);
        } else {
            reinterpret_cast<float4*>(p.partial_out)[place * outputs + i] = m.value;
            if (quad == 0) p.partial_lse[place * p.group + head] = m.lse;
        }
    }
}
