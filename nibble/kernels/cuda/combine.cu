// The splits of a sequence combined, in their order: one block for a query head, one row of threads for every eighth split,
// a thread for eight channels.
#include "result.cuh"
#include "schedule.cuh"

constexpr int kRows = 8;
constexpr int kColumns = kHeadDim / 8;
constexpr int kAtOnce = 16;  // log-sum-exps that a thread fetches side by side

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

extern "C" __global__ void __launch_bounds__(kRows * kColumns) combine_splits(const DecodeParams p) {
    __shared__ Channels totals[kRows][kColumns];
    __shared__ float sums[kRows];
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
    const long long step = static_cast<long long>(p.group) * kColumns;
    float largest = kLowest;
    for (int i = 0; i < num_splits; i += kAtOnce)
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) largest = fmaxf(largest, lse[min(i + k, num_splits - 1) * p.group]);
    Channels total{};
    float sum = 0;
#pragma unroll 2
    for (int i = row; i < num_splits; i += kRows) {
        const float by = exp2_fast(lse[i * p.group] - largest);
        total.add(from_halves(out[i * step]), by);
        sum += by;
    }
    totals[row][column] = total;
    if (column == 0) sums[row] = sum;
    __syncthreads();
    if (row != 0) return;
#pragma unroll
    for (int i = 1; i < kRows; ++i) total.add(totals[i][column], 1.0f), sum += sums[i];
    const float by = sum != 0 ? 1.0f / sum : 0.0f;
    const float whole = sum != 0 ? largest + log2_fast(sum) : -__int_as_float(0x7f800000);
    store_result(p, batch, kv_head, head, 2 * column, {scaled(total.first, by), whole});
    store_result(p, batch, kv_head, head, 2 * column + 1, {scaled(total.second, by), whole});
}
