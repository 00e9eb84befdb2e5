// Filling a stage of shared memory: bulk copies started by one lane from sm_90 on, 16-byte cp.async by a whole warp before.
//
//   begin(bytes) -> copy(to, from, bytes) as often as needed -> end()
#pragma once
#include "ptx.cuh"

constexpr u64 kReadOnce = 0x12f0000000000000ull;  // what createpolicy gives for L2::evict_first

struct Copier {
    u32 barrier;  // completes when all bytes have landed
    int worker;
    int workers;

#if __CUDA_ARCH__ >= 900
    DEVICE void begin(u32 bytes) const {
        asm volatile("{.reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;}" ::"r"(barrier),
                     "r"(bytes)
                     : "memory");
    }
    DEVICE void copy(u32 to, const u8* from, u32 bytes) const {
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                to),
            "l"(from), "r"(bytes), "r"(barrier), "l"(kReadOnce)
            : "memory");
    }
    DEVICE void end() const {}
#else
    DEVICE void begin(u32) const {
        if (worker == 0) barrier_arrive(barrier);
        __syncwarp();
    }
    DEVICE void copy(u32 to, const u8* from, u32 bytes) const {
        for (u32 at = worker * 16; at < bytes; at += workers * 16)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + at), "l"(from + at) : "memory");
    }
    DEVICE void end() const {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
    }
#endif
};

#if __CUDA_ARCH__ >= 900
constexpr u32 kFillArrivals = 1;
#else
constexpr u32 kFillArrivals = 33;
#endif
