// Decode attention over a paged cache of fp16 and sealed pages, one launch for a whole batch.
//
// A persistent block: consumer warps that attend over an item each (a sealed page or a part of one, or 16 tokens of an
// fp16 page), a producer warp that keeps a ring of items in flight with bulk copies, a query warp that prepares the
// operands of the next unit, and merger warps that make one result of the last. Units are what blocks deal in: a split of one sequence and KV head
// (schedule.cuh). Nobody waits for a whole block inside a list of units.
#include "attend.cuh"
#include "merge.cuh"
#include "producer.cuh"

// The place of a warp in a unit that begins with item `first`: items place, place + consumers, ... of the unit are its own.
DEVICE int slot_of(const DecodeParams& p, u32 first, int warp) {
    const int first_warp = first % p.consumers;
    return warp - first_warp + (warp < first_warp ? p.consumers : 0);
}

// A full barrier tells one filling of its stage from the next by parity alone, and fillings may land out of order: only
// once the producer has opened the stage for this item is the parity unambiguous.
DEVICE void wait_for_item(Shared* s, const RingPlace& place) {
    while (observe(shared_address(&s->opened[place.stage()])) != place.item) {
    }
    __syncwarp();
    barrier_wait(shared_address(&s->full[place.stage()]), place.phase());
    __syncwarp();
}

// Unit number n since the kernel began; `items` counts what all consumers have behind them.
DEVICE void consume(const DecodeParams& p, const Carved& c, int n, int warp, int lane, u32& items) {
    Shared* s = c.fixed;
    const Unit& unit = s->units[n % kUnitTable];
    RunningState state;
    state.reset();
    const int slot = slot_of(p, items, warp);
    barrier_wait(shared_address(&s->query_full[n & 1]), n >> 1 & 1);
    RingPlace mine = RingPlace::at(items + slot, p.stages);
    items += unit.num_items;
    while (static_cast<int>(items - mine.item) > 0) {
        wait_for_item(s, mine);
        const ItemHeader& header = s->headers[mine.stage()];
        const ItemContext context{p, unit, s, n & 1, lane};
        const u32 stage = c.stages + mine.stage() * p.stage_bytes;
        if constexpr (kCoded) {
            if (header.is_half)
                attend_half(context, header, stage, state);
            else
                attend_coded(context, header, stage, state);
        } else {
            attend_half(context, header, stage, state);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&s->empty[mine.stage()]));
        mine.advance(p.consumers, p.stages);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&s->query_empty[n & 1]));
    convert(p, unit.kv_head, state, false, lane);
    barrier_wait(shared_address(&s->merge_empty), n & 1 ^ 1);
    items -= unit.num_items;
    const int final_slot = slot_of(p, items, warp);
    if (final_slot < unit.num_items) store_state(c, final_slot, lane, state);
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&s->merge_full));
    items += unit.num_items;
}

DEVICE void initialise(const DecodeParams& p, Shared* s) {
    for (int i = 0; i < p.stages; ++i) {
        barrier_init(shared_address(&s->full[i]), kFillArrivals);
        barrier_init(shared_address(&s->empty[i]), 1);
        s->opened[i] = ~0u;
    }
    for (int i = 0; i < kQueryBuffers; ++i) {
        barrier_init(shared_address(&s->query_full[i]), 1);
        barrier_init(shared_address(&s->query_empty[i]), p.consumers);
    }
    barrier_init(shared_address(&s->merge_full), p.consumers);
    barrier_init(shared_address(&s->merge_empty), kMergers);
    publish_barriers();
}

// Lists this block's units from number `begin` on; false when there are none left.
DEVICE bool list_units(const DecodeParams& p, const Carved& c, int begin) {
    const int units = p.kv_heads * c.splits_before[p.batch], blocks = gridDim.x, block = blockIdx.x;
    const int listed = min(kUnitTable, (units - block + blocks - 1) / blocks - begin);
    if (units <= block || listed <= 0) return false;
    for (int i = threadIdx.x; i < listed; i += blockDim.x)
        c.fixed->units[i] = find_unit(p, c.splits_before, block + (begin + i) * blocks);
    if (threadIdx.x == 0) c.fixed->listed_end = begin + listed;
    __syncthreads();
    return true;
}

extern "C" __global__ void __launch_bounds__((kMaxConsumers + 2 + kMergers) * 32, 1)
    decode_attention(const DecodeParams p) {
    extern __shared__ __align__(128) u8 memory[];
    const Carved c = carve(memory, p);
    Shared* s = c.fixed;
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    if (threadIdx.x == 0) initialise(p, s);
    overlap_launches();
    if (warp == 1) count_splits(p, c.splits_before, lane);
    __syncthreads();

    u32 items = 0;  // behind the consumers, or the producer
    for (int begin = 0;; begin += kUnitTable) {
        if (!list_units(p, c, begin)) break;
        if (warp < p.consumers) {
            for (int n = begin; n < s->listed_end; ++n) consume(p, c, n, warp, lane, items);
        } else if (warp == p.consumers) {
            Producer producer(p, c, lane, items);
            for (int n = begin; n < s->listed_end; ++n) producer.fill(s->units[n % kUnitTable]);
            producer.finish();
        } else if (warp == p.consumers + 1) {
            prepare_units(p, s, begin, lane);
        } else {
            merge_units(p, c, begin, warp - p.consumers - 2, lane);
        }
        __syncthreads();
    }
}
