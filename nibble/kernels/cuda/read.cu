// Reads memory and does nothing else: the measured ceiling that the benchmark compares with.
#include "ptx.cuh"

struct ReadParams {
    const uint4* from;
    u32* out;
    u64 count;  // 16-byte units
};

extern "C" __global__ void __launch_bounds__(512) read_memory(const ReadParams p) {
    u32 sum = 0;
    const u64 step = static_cast<u64>(gridDim.x) * blockDim.x;
    u64 at = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; at + 7 * step < p.count; at += 8 * step) {
        uint4 x[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = __ldcs(p.from + at + i * step);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum ^= x[i].x ^ x[i].y ^ x[i].z ^ x[i].w;
    }
    for (; at < p.count; at += step) sum ^= __ldcs(p.from + at).x;
    if (sum == 0x12345678u) *p.out = sum;
}
