// The splits of a sequence combined, in their order: a block for a query head, two rows of threads that take the splits in
// turns, a thread for eight channels. Such a launch is latency above all: what a thread needs of its splits it fetches side by
// side, log-sum-exps and results, and few threads have to meet.
#include "result.cuh"
#include "schedule.cuh"

constexpr int kRows = 2;    // nibble/kernels/instances.py has the same
constexpr int kAtOnce = 8;  // splits that a thread fetches side by side
constexpr int kColumns = kHeadDim / 8;
constexpr int kThreads = kRows * kColumns;
constexpr int kWholeWarps = (kThreads + 31) / 32 * 32;
// At 128 channels 16 blocks fit on a multiprocessor: all of a lone sequence's wait on the few that decoding leaves idle.
constexpr int kBlocks = 512 / kWholeWarps;

struct Channels {
    float4 first, second;

    DEVICE void add(const Channels& x, float by) {
        first = scaled_plus(x.first, by, first), second = scaled_plus(x.second, by, second);
    }
};

DEVICE Channels from_halves(uint4 x) {
    return {make_float4(half_low(x.x), half_high(x.x), half_low(x.y), half_high(x.y)),
            make_float4(half_low(x.z), half_high(x.z), half_low(x.w), half_high(x.w))};
}

// A sum of results, each with weight 2^(lse - reference).
struct WeightedSum {
    Channels total{};
    float weight = 0;
    float reference = kLowest;

    DEVICE void move_reference(float to) {
        const float by = exp2_fast(reference - to);
        total.first = scaled(total.first, by), total.second = scaled(total.second, by);
        weight = __fmul_rn(weight, by);
        reference = to;
    }
    DEVICE void add(const Channels& x, float x_weight, float lse) {
        const float by = exp2_fast(lse - reference);
        total.add(x, by);
        weight = __fmaf_rn(x_weight, by, weight);
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) combine_splits(const DecodeParams p) {
    __shared__ WeightedSum others[kColumns];  // of the second row of threads
    const int column = threadIdx.x % kColumns, row = threadIdx.x / kColumns;
    const int kv_head_index = blockIdx.x / p.group, head = blockIdx.x - kv_head_index * p.group;
    const int batch = kv_head_index / p.kv_heads, kv_head = kv_head_index - batch * p.kv_heads;
    const int num_splits = visible_pages(p, p.seq_lens[batch]).num_splits;
    start_next_kernel();         // it waits for this one
    wait_for_previous_kernel();  // the lengths are older than that
    if (num_splits == 1) return;

    const long long first = static_cast<long long>(kv_head_index) * p.max_splits;
    const float* lse = p.partial_lse + first * p.group + head;
    const uint4* out = reinterpret_cast<const uint4*>(p.partial_out) + (first * p.group + head) * kColumns + column;
    WeightedSum sum;
    for (int begin = row; begin < num_splits; begin += kRows * kAtOnce) {
        uint4 parts[kAtOnce] = {};
        float sizes[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
            const int i = begin + k * kRows;
            sizes[k] = -__int_as_float(0x7f800000);
            if (i < num_splits) parts[k] = out[i * p.group * kColumns], sizes[k] = lse[i * p.group];
        }
        float largest = sum.reference;
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) largest = fmaxf(largest, sizes[k]);
        sum.move_reference(largest);
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) sum.add(from_halves(parts[k]), 1.0f, sizes[k]);
    }
    if (row == 1) others[column] = sum;
    __syncthreads();
    if (row == 1) return;
    const WeightedSum other = others[column];
    sum.move_reference(fmaxf(sum.reference, other.reference));
    sum.add(other.total, other.weight, other.reference);
    const float by = sum.weight != 0 ? 1.0f / sum.weight : 0.0f;
    const float whole = sum.weight != 0 ? sum.reference + log2_fast(sum.weight) : -__int_as_float(0x7f800000);
    store_result(p, batch, kv_head, head, 2 * column, {scaled(sum.total.first, by), whole});
    store_result(p, batch, kv_head, head, 2 * column + 1, {scaled(sum.total.second, by), whole});
}
