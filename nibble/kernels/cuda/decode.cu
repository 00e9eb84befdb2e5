// Decode attention over a paged cache of fp16 and sealed pages, one launch for a whole batch.
//
// A persistent block: consumer warps that attend over an item each (a sealed page or a part of one, or 16 tokens of an
// fp16 page), a producer warp that keeps a ring of items in flight with bulk copies, and a query warp that prepares the
// operands of the next unit. Units are what blocks deal in: a split of one sequence and KV head (schedule.cuh).
#include "attend.cuh"
#include "merge.cuh"
#include "producer.cuh"

struct Consumer {
    RingPlace place;
    QueryPlace query;
};

DEVICE void consume(const DecodeParams& p, const Carved& c, const Unit& unit, int warp, int lane,
                    Consumer& me) {
    Shared* s = c.fixed;
    RunningState state;
    state.reset();
    barrier_wait(shared_address(&s->query_full[me.query.buffer]), me.query.phase);
    RingPlace mine = me.place;
    mine.advance(warp, p.stages);
    for (int item = warp; item < unit.num_items; item += p.consumers) {
        barrier_wait(shared_address(&s->full[mine.stage]), mine.phase);
        const ItemHeader& header = s->headers[mine.stage];
        const ItemContext context{p, unit, s, me.query.buffer, lane};
        const u32 stage = c.stages + mine.stage * p.stage_bytes;
        if constexpr (kCoded) {
            if (header.is_half)
                attend_half(context, header, stage, state);
            else
                attend_coded(context, header, stage, state);
        } else {
            attend_half(context, header, stage, state);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&s->empty[mine.stage]));
        mine.advance(p.consumers, p.stages);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&s->query_empty[me.query.buffer]));
    me.query.advance();
    me.place.advance(unit.num_items, p.stages);
    convert(p, unit.kv_head, state, false, lane);
    finish_unit(p, c, unit, warp, lane, state);
}

extern "C" __global__ void __launch_bounds__((kMaxConsumers + 2) * 32, kBlocksPerMultiprocessor) decode_attention(const DecodeParams p) {
    extern __shared__ __align__(128) u8 memory[];
    const Carved c = carve(memory, p);
    Shared* s = c.fixed;
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.stages; ++i) {
            barrier_init(shared_address(&s->full[i]), kFillArrivals);
            barrier_init(shared_address(&s->empty[i]), 1);
        }
        for (int i = 0; i < kQueryBuffers; ++i) {
            barrier_init(shared_address(&s->query_full[i]), 1);
            barrier_init(shared_address(&s->query_empty[i]), p.consumers);
        }
#if __CUDA_ARCH__ >= 900
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    overlap_launches();
    if (warp == 1) count_splits(p, c.splits_before, lane);
    __syncthreads();

    const long long units = p.kv_heads * c.splits_before[p.batch];
    const int begin = units * blockIdx.x / gridDim.x, end = units * (blockIdx.x + 1) / gridDim.x;
    Consumer consumer;
    Producer producer(p, c, lane);
    QueryPlace query;
    for (int first = begin; first < end; first += kUnitTable) {
        const int listed = min(kUnitTable, end - first);
        for (int i = threadIdx.x; i < listed; i += blockDim.x) s->units[i] = find_unit(p, c.splits_before, first + i);
        __syncthreads();
        for (int i = 0; i < listed; ++i) {
            const Unit& unit = s->units[i];
            if (warp < p.consumers) {
                consume(p, c, unit, warp, lane, consumer);
            } else if (warp == p.consumers) {
                producer.fill(unit);
            } else {
                barrier_wait(shared_address(&s->query_empty[query.buffer]), query.phase ^ 1);
                prepare_queries(p, unit, s, query.buffer, lane);
                __syncwarp();
                if (lane == 0) barrier_arrive(shared_address(&s->query_full[query.buffer]));
                query.advance();
            }
        }
        __syncthreads();
    }
}
