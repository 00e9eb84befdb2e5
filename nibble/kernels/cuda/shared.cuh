// The block's shared memory, carved once.
//
//   | unit table, barriers, item headers, queries x 2, merge states | merge: O | splits before each sequence | stages |
#pragma once
#include "config.cuh"
#include "schedule.cuh"

// What a consumer must know of the item in a stage.
struct ItemHeader {
    int first_token;
    int is_half;       // fp16 rows, not codes
    int token_begin;   // tokens in [token_begin, token_end) count
    int token_end;
};

constexpr int kQueryBuffers = 2;
constexpr int kMaxStages = 32;
constexpr int kQuerySetBytes = kHeadTiles * kQueryChunks * 32 * 16;       // one query operand for every lane
// Raw queries; static formats: those times the scales, and with kSplit what rounding these lost.
constexpr int kQuerySets = kKScale != kStaticChannel ? 1 : kSplit ? 3 : 2;
constexpr int kQueryBytes = kQuerySets * kQuerySetBytes + kHeadSlots * 16;

struct Shared {
    Unit units[kUnitTable];
    u64 full[kMaxStages];
    u64 empty[kMaxStages];
    u64 query_full[kQueryBuffers];
    u64 query_empty[kQueryBuffers];
    u64 merge_full;
    u64 merge_empty;
    u64 listed;
    int listed_end;  // units listed so far; the list holds the last kUnitTable
    int unused;
    ItemHeader headers[kMaxStages];
    uint4 queries[kQueryBuffers][kQueryBytes / 16];
    float2 merge_states[kMaxConsumers][kHeadSlots];  // maximum (later weight) and sum
    float merge_lse[kHeadSlots];
    u32 opened[kMaxStages];                          // the item for which the producer has opened the stage
};
static_assert(sizeof(Shared) == SHARED_BYTES, "nibble/kernels/instances.py has another idea of struct Shared");
// Behind it: merge_out float [consumers][head slots][kMergeStride], then int splits_before[batch + 1], then the stages.

DEVICE u32 round_up_128(u32 x) { return (x + 127) & ~127u; }

// A place in the ring, moved forward item by item; never by more than the ring's length at once.
struct RingPlace {
    u32 item = 0;   // since the kernel began
    u32 where = 0;  // stage, and the phase in bit 16

    DEVICE static RingPlace at(u32 item, u32 stages) {
        RingPlace place;
        place.item = item;
        place.where = item % stages | (item / stages & 1) << 16;
        return place;
    }
    DEVICE int stage() const { return where & 0xffff; }
    DEVICE u32 phase() const { return where >> 16; }
    DEVICE void advance(int steps, int stages) {
        item += steps;
        where += steps;
        if (stage() >= stages) where = where - stages ^ 0x10000;
    }
};

struct Carved {
    Shared* fixed;
    MergeNumber* merge_out;
    int* splits_before;
    u32 stages;  // shared address
};

DEVICE Carved carve(const DecodeParams& p) {
    extern __shared__ __align__(128) u8 memory[];
    Carved c;
    c.fixed = reinterpret_cast<Shared*>(memory);
    u32 at = round_up_128(sizeof(Shared));
    c.merge_out = reinterpret_cast<MergeNumber*>(memory + at);
    at += p.consumers * kHeadSlots * kMergeStride * sizeof(MergeNumber);
    c.splits_before = reinterpret_cast<int*>(memory + at);
    at = round_up_128(at + (p.batch + 1) * 4);
    c.stages = shared_address(memory) + at;
    return c;
}
