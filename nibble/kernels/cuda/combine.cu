// The splits of a sequence combined, in their order: one block for a query head, one row of threads for every fourth split.
#include "result.cuh"
#include "schedule.cuh"

constexpr int kRows = 4;

extern "C" __global__ void __launch_bounds__(kRows * kQuads) combine_splits(const DecodeParams p) {
    __shared__ float4 totals[kRows][kQuads];
    __shared__ float sums[kRows];
    const int quad = threadIdx.x % kQuads, row = threadIdx.x / kQuads;
    const int kv_head_index = blockIdx.x / p.group, head = blockIdx.x - kv_head_index * p.group;
    const int batch = kv_head_index / p.kv_heads, kv_head = kv_head_index - batch * p.kv_heads;
    const int num_splits = visible_pages(p, p.seq_lens[batch]).num_splits;
    start_next_kernel();         // it waits for this one
    wait_for_previous_kernel();  // the lengths are older than that
    if (num_splits == 1) return;

    const long long first = static_cast<long long>(kv_head_index) * p.max_splits;
    const float* lse = p.partial_lse + first * p.group + head;
    const float4* out = reinterpret_cast<const float4*>(p.partial_out) + (first * p.group + head) * kQuads + quad;
    const long long step = static_cast<long long>(p.group) * kQuads;
    float largest = kLowest;
#pragma unroll 8
    for (int i = 0; i < num_splits; ++i) largest = fmaxf(largest, lse[i * p.group]);
    float4 total = make_float4(0, 0, 0, 0);
    float sum = 0;
#pragma unroll 4
    for (int i = row; i < num_splits; i += kRows) {
        const float by = exp2_fast(lse[i * p.group] - largest);
        total = scaled_plus(out[i * step], by, total);
        sum += by;
    }
    totals[row][quad] = total;
    if (quad == 0) sums[row] = sum;
    __syncthreads();
    if (row != 0) return;
#pragma unroll
    for (int i = 1; i < kRows; ++i) total = scaled_plus(totals[i][quad], 1.0f, total), sum += sums[i];
    Merged m{make_float4(0, 0, 0, 0), -__int_as_float(0x7f800000)};
    if (sum != 0) m = {scaled(total, 1.0f / sum), largest + log2_fast(sum)};
    store_result(p, batch, kv_head, head, quad, m);
}
