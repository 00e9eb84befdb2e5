// The end of a unit: each consumer leaves its state in shared memory and goes on; merger warps make one result of the
// states, a head each in turn, the final one when the sequence has a single split. After a block's last unit the consumers
// are the mergers.
//
// A consumer's result, normalised, goes to a slot that follows from the unit's items alone, and every sum runs over the slots in
// a fixed order, so what comes out does not depend on what else the block has done, nor on who merges.
#pragma once
#include "result.cuh"
#include "state.cuh"

DEVICE void store_state(const Carved& c, int slot, int lane, const RunningState& s) {
    const int g = lane / 4, j = lane & 3;
    float by[2], plus[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float sum = s.sums.probabilities(h, lane), zero = s.sums.numbers(h, lane);
        by[h] = sum > 0 ? 1.0f / sum : 0.0f;
        plus[h] = zero * by[h];
        if (first_row(lane) == 0) c.fixed->merge_states[slot][head_of(lane, h)] = make_float2(s.largest[h], sum);
    }
    MergeNumber* const rows = c.merge_out + slot * kHeadSlots * kMergeStride;
#pragma unroll
    for (int tile = 0; tile < kChannelTiles; ++tile) {
        Product x = s.out[tile];
#pragma unroll
        for (int i = 0; i < 4 * kLaneRows; ++i) {
            const int half = i & 1, h = i >> 1 & 1, row = i / 4;
            float& value = x.at(half, h, row);
            value = value * by[h] + plus[h];
            if (!kMergesHalves) rows[head_of(lane, h) * kMergeStride + 16 * tile + 8 * half + g] = value;
        }
        if (!kMergesHalves) continue;
        HeadOperand pairs;
        to_operand(pairs, x);
#pragma unroll
        for (int i = 0; i < 2 * kHeadTiles; ++i) {
            const int head = 8 * (i % kHeadTiles) + g, channel = 16 * tile + 8 * (i / kHeadTiles) + 2 * j;
            *reinterpret_cast<u32*>(rows + head * kMergeStride + channel) = pairs[i];
        }
    }
}

DEVICE float max_of_16(float x) {
#pragma unroll
    for (int step = 1; step < 16; step *= 2) x = fmaxf(x, __shfl_xor_sync(kFullMask, x, step));
    return x;
}
DEVICE float sum_of_16(float x) {
#pragma unroll
    for (int step = 1; step < 16; step *= 2) x += __shfl_xor_sync(kFullMask, x, step);
    return x;
}

// A warp among `count` that merge a unit: it takes the heads number, number + count, ...
struct Merger {
    int number;
    int count;
    int lane;
};

// Weights of the slots of each of a merger's heads; half a warp takes a head, a lane a slot.
DEVICE void weigh_slots(const Carved& c, int slots, const Merger& merger) {
    const int slot = merger.lane & 15;
    for (int first = merger.number; first < kHeadSlots; first += 2 * merger.count) {
        const int head = first + merger.lane / 16 * merger.count;
        const bool is_there = slot < slots && head < kHeadSlots;
        const float2 state = is_there ? c.fixed->merge_states[slot][head] : make_float2(kLowest, 0);
        const float largest = max_of_16(state.x);
        const float mass = __fmul_rn(state.y, exp2_fast(state.x - largest)), sum = sum_of_16(mass);
        if (is_there) c.fixed->merge_states[slot][head].x = sum > 0 ? mass / sum : 0.0f;
        const float lse = sum > 0 ? largest + log2_fast(sum) : -__int_as_float(0x7f800000);
        if (slot == 0 && head < kHeadSlots) c.fixed->merge_lse[head] = lse;
    }
    __syncwarp();
}

DEVICE float4 load_quad(const float* from) { return *reinterpret_cast<const float4*>(from); }
DEVICE float4 load_quad(const u16* from) {
    const uint2 x = *reinterpret_cast<const uint2*>(from);
    return make_float4(half_low(x.x), half_high(x.x), half_low(x.y), half_high(x.y));
}

DEVICE Merged merge_slots(const Carved& c, int slots, int head, int quad) {
    float4 total = make_float4(0, 0, 0, 0);
#pragma unroll 4
    for (int slot = 0; slot < slots; ++slot) {
        const float4 value = load_quad(c.merge_out + (slot * kHeadSlots + head) * kMergeStride + quad * 4);
        total = scaled_plus(value, c.fixed->merge_states[slot][head].x, total);
    }
    return {total, c.fixed->merge_lse[head]};
}

DEVICE void finish_unit(const DecodeParams& p, const Carved& c, const Unit& unit, const Merger& merger) {
    const int slots = min(p.consumers, unit.num_items);
    weigh_slots(c, slots, merger);
    const long long place = (static_cast<long long>(unit.batch) * p.kv_heads + unit.kv_head) * p.max_splits + unit.split;
    for (int head = merger.number; head < p.group; head += merger.count)
#pragma unroll
        for (int first = 0; first < kQuads; first += 32) {
            const int quad = first + merger.lane;
            if (quad >= kQuads) break;
            const Merged m = merge_slots(c, slots, head, quad);
            if (unit.num_splits == 1) {
                store_result(p, unit.batch, unit.kv_head, head, quad, m);
            } else {
                const long long row = place * p.group + head;
                reinterpret_cast<uint2*>(p.partial_out)[row * kQuads + quad] =
                    make_uint2(pack_halves(m.value.x, m.value.y), pack_halves(m.value.z, m.value.w));
                if (quad == 0) p.partial_lse[row] = m.lse;
            }
        }
}

// The merger warps. Units are counted from the kernel's beginning: the parity is the phase of the merge.
DEVICE void merge_units(const DecodeParams& p, const Carved& c, int begin, int end, const Merger& merger) {
    Shared* s = c.fixed;
    for (int n = begin; n < end; ++n) {
        barrier_wait_asleep(shared_address(&s->merge_full), n & 1);
        __syncwarp();
        finish_unit(p, c, s->units[n % kUnitTable], merger);
        __syncwarp();
        arrive_for_warp(shared_address(&s->merge_empty), merger.lane);
    }
}
