// The few instructions the kernels need, one function each. No header is included, so NVRTC needs none.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#define DEVICE __device__ __forceinline__

constexpr u32 kFullMask = 0xffffffffu;

DEVICE u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// ---- numbers ----
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float half_low(u32 pair) {
    float y;
    asm("{.reg .f16 l,h; mov.b32 {l,h}, %1; cvt.f32.f16 %0, l;}" : "=f"(y) : "r"(pair));
    return y;
}
DEVICE float half_high(u32 pair) {
    float y;
    asm("{.reg .f16 l,h; mov.b32 {l,h}, %1; cvt.f32.f16 %0, h;}" : "=f"(y) : "r"(pair));
    return y;
}
DEVICE u32 pack_halves(float low, float high) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
DEVICE u32 pack_bfloats(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
DEVICE float bfloat_low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float bfloat_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
DEVICE u32 multiply_halves(u32 a, u32 b) {
    u32 y;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

// a b - c: what rounding a b to c lost.
DEVICE u32 rounding_error(u32 a, u32 b, u32 c) {
    u32 y;
    asm("{.reg .b32 n; neg.f16x2 n, %3; fma.rn.f16x2 %0, %1, %2, n;}" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    return y;
}

// ---- tensor cores ----
// d[16 x 8] += a[16 x 16] b[16 x 8]. Lane = 4 g + j holds of a: rows g, g+8 and columns 2j, 2j+1, 2j+8, 2j+9; of b:
// rows 2j, 2j+1 (b0), 2j+8, 2j+9 (b1) of column g; of d: rows g (d0, d1) and g+8 (d2, d3) of columns 2j, 2j+1.
DEVICE void mma(float (&d)[4], const u32* a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// An 8 x 8 matrix of halves, one pair a lane, transposed across the warp.
DEVICE u32 transpose8x8(u32 pair) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(pair));
    return y;
}

// ---- shared memory ----
DEVICE uint4 load_shared16(u32 address) {
    uint4 y;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(y.x), "=r"(y.y), "=r"(y.z), "=r"(y.w)
                 : "r"(address)
                 : "memory");
    return y;
}
DEVICE uint2 load_shared8(u32 address) {
    uint2 y;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(y.x), "=r"(y.y) : "r"(address) : "memory");
    return y;
}
DEVICE u32 load_shared4(u32 address) {
    u32 y;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(y) : "r"(address) : "memory");
    return y;
}
DEVICE void store_shared16(u32 address, uint4 x) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

// ---- launches ----
// Waits for the previous kernel and for what it wrote.
DEVICE void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next kernel start its launch, once all blocks say so: what it does before it waits overlaps this kernel.
DEVICE void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// A word that the previous kernel may be writing: past the L1 cache, which would keep the old one.
DEVICE int load_past_l1(const int* from) {
    int y;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(y) : "l"(from) : "memory");
    return y;
}

// ---- registers ----
// What a thread may use from here on; for all warps of a warpgroup (four that lie together).
template <int kRegisters>
DEVICE void raise_register_limit() {
#if __CUDA_ARCH__ >= 900
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
DEVICE void lower_register_limit() {
#if __CUDA_ARCH__ >= 900
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

// ---- barriers ----
// Some warps of the block wait for one another; how many of their threads say yes.
DEVICE int count_among(int threads, bool yes) {
    int count;
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; barrier.cta.red.popc.u32 %0, 1, %1, p;}"
                 : "=r"(count)
                 : "r"(threads), "r"(static_cast<u32>(yes))
                 : "memory");
    return count;
}
// The first `warps` warps of the block wait for one another.
DEVICE void wait_for_warps(int warps) { asm volatile("barrier.cta.sync 2, %0;" ::"r"(warps * 32) : "memory"); }
DEVICE void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to bulk copies.
DEVICE void publish_barriers() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(barrier) : "memory");
}
DEVICE bool barrier_poll(u32 barrier, u32 parity) {
    u32 done;
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#else
    // mbarrier.test_wait.parity came with sm_90's PTX; on sm_80 it is the same instruction without suspension.
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#endif
    return done != 0;
}
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    while (!barrier_poll(barrier, parity)) {
    }
}
// The same for a warp with time: asking again and again takes issue slots from those that have work.
DEVICE void barrier_wait_asleep(u32 barrier, u32 parity) {
    while (!barrier_poll(barrier, parity)) asm volatile("nanosleep.u32 200;" ::: "memory");
}
// One lane arrives for its warp, which has synchronised; a word is changed by one thread while others watch. racecheck
// understands neither: it takes an arrival to speak for the arriving thread alone. For it, every lane arrives and words are
// changed and watched by atomic operations; the protocol is the same.
#ifdef EVERY_LANE_ARRIVES
constexpr u32 kWarpArrivals = 32;
#else
constexpr u32 kWarpArrivals = 1;
#endif
DEVICE void arrive_for_warp(u32 barrier, int lane) {
    if (kWarpArrivals == 32 || lane == 0) barrier_arrive(barrier);
}
DEVICE void publish(u32 address, u32 value) {
    if (kWarpArrivals == 32)
        asm volatile("{.reg .u32 y; atom.shared.exch.b32 y, [%0], %1;}" ::"r"(address), "r"(value) : "memory");
    else
        asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
DEVICE u32 observe(u32 address) {
    u32 y;
    if (kWarpArrivals == 32)
        asm volatile("atom.shared.or.b32 %0, [%1], 0;" : "=r"(y) : "r"(address) : "memory");
    else
        asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(y) : "r"(address) : "memory");
    return y;
}
