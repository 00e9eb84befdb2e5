// Filling a stage of shared memory: bulk copies from sm_90 on, 16-byte cp.async before. The calls are the same; every
// lane of the producer warp makes them.
//
//   begin_fill(barrier, bytes) -> copy_block(...) as often as needed -> end_fill(barrier)
#pragma once
#include "ptx.cuh"

#if __CUDA_ARCH__ >= 900
constexpr u32 kFillArrivals = 1;

DEVICE void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
DEVICE void begin_fill(u32 barrier, u32 bytes, int lane) {
    if (lane == 0)
        asm volatile("{.reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;}" ::"r"(barrier),
                     "r"(bytes)
                     : "memory");
    __syncwarp();
}
DEVICE void copy_block(u32 to, const u8* from, u32 bytes, u32 barrier, int lane) {
    if (lane == 0) bulk_copy(to, from, bytes, barrier);
}
DEVICE void end_fill(u32) {}
#else
constexpr u32 kFillArrivals = 33;

DEVICE void copy16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void begin_fill(u32 barrier, u32, int lane) {
    if (lane == 0) barrier_arrive(barrier);
    __syncwarp();
}
DEVICE void copy_block(u32 to, const u8* from, u32 bytes, u32, int lane) {
    for (u32 at = lane * 16; at < bytes; at += 32 * 16) copy16(to + at, from + at);
}
DEVICE void end_fill(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
#endif
