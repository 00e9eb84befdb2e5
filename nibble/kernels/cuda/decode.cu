// Decode attention over a paged cache of fp16 and sealed pages, one launch for a whole batch.
//
// A persistent block: consumer warps that attend over an item each (a sealed page or a part of one, or 16 or 8 tokens of an
// fp16 page) for all query heads of a group, a producer warp that keeps a ring of items in flight with bulk copies, a query
// warp that prepares the operands of the next unit, and merger warps that make one result of the last. Units are what
// blocks deal in: a split of one sequence and KV head (schedule.cuh). Nobody waits for a whole block inside a list of units.
#include "attend.cuh"
#include "merge.cuh"
#include "producer.cuh"

// A full barrier tells one filling of its stage from the next by parity alone, and fillings may land out of order: only
// once the producer has opened the stage for this item is the parity unambiguous.
DEVICE void wait_for_item(Shared* s, const RingPlace& place) {
    const u32 opened = shared_address(&s->opened[place.stage()]), full = shared_address(&s->full[place.stage()]);
    while (observe(opened) != place.item || !barrier_poll(full, place.phase())) {
    }
    __syncwarp();
}

// Unit number n since the kernel began. A consumer's items are every p.consumers-th since then, `mine` its next; `items`
// counts what all consumers have behind them.
DEVICE void consume(const DecodeParams& p, const Carved& c, int n, int lane, RingPlace& mine, u32& items) {
    Shared* s = c.fixed;
    const Unit& unit = s->units[n % kUnitTable];
    RunningState state;
    state.reset();
    const int slot = mine.item - items;
    items += unit.num_items;
    barrier_wait(shared_address(&s->query_full[n & 1]), n >> 1 & 1);
    while (static_cast<int>(items - mine.item) > 0) {
        wait_for_item(s, mine);
        const ItemHeader& header = s->headers[mine.stage()];
        const ItemContext context{p, unit.kv_head, s, n & 1, lane};
        const u32 stage = c.stages + mine.stage() * p.stage_bytes;
        if (header.is_half || !kCoded)
            attend_half(context, header, stage, state);
        else if constexpr (kCoded)
            attend_coded(context, header, stage, state);
        __syncwarp();
        arrive_for_warp(shared_address(&s->empty[mine.stage()]), lane);
        mine.advance(p.consumers, p.stages);
    }
    __syncwarp();
    arrive_for_warp(shared_address(&s->query_empty[n & 1]), lane);
    convert(p, unit.kv_head, state, false, lane);
    barrier_wait(shared_address(&s->merge_empty), n & 1 ^ 1);
    if (slot < unit.num_items) store_state(c, slot, lane, state);
    __syncwarp();
    arrive_for_warp(shared_address(&s->merge_full), lane);
}

// The warps share the work: the lanes of one would take turns.
DEVICE void initialise(const DecodeParams& p, Shared* s, int warp, int warps) {
    for (int i = warp; i < p.stages; i += warps) {
        barrier_init(shared_address(&s->full[i]), kFillArrivals);
        barrier_init(shared_address(&s->empty[i]), kWarpArrivals);
        s->opened[i] = ~0u;
    }
    if (warp < kQueryBuffers) {
        barrier_init(shared_address(&s->query_full[warp]), kWarpArrivals);
        barrier_init(shared_address(&s->query_empty[warp]), p.consumers * kWarpArrivals);
    } else if (warp == kQueryBuffers) {
        barrier_init(shared_address(&s->merge_full), p.consumers * kWarpArrivals);
        barrier_init(shared_address(&s->merge_empty), kMergers * kWarpArrivals);
        barrier_init(shared_address(&s->listed), kWarpArrivals == 32 ? 32 * kHelpers : 1);
    }
    publish_barriers();
}

// Whether this block has nothing left after its unit number n.
DEVICE bool is_last_unit(const DecodeParams& p, const Carved& c, int n) {
    return static_cast<int>(blockIdx.x + (n + 1) * gridDim.x) >= p.kv_heads * c.splits_before[p.batch];
}

// After the block's last unit consumers have nothing to go on with and merge themselves, all of them.
DEVICE void run_consumer(const DecodeParams& p, const Carved& c, int consumer, int lane) {
    Shared* s = c.fixed;
    RingPlace mine = RingPlace::at(consumer, p.stages);
    u32 items = 0;
    int n = 0;
    for (int list = 0;; ++list) {
        barrier_wait(shared_address(&s->listed), list & 1);
        const int end = s->listed_end;
        if (n == end) return;
        for (; n < end; ++n) consume(p, c, n, lane, mine, items);
        if (is_last_unit(p, c, n - 1)) break;
        __syncthreads();
    }
    wait_for_warps(p.consumers);
    finish_unit(p, c, s->units[(n - 1) % kUnitTable], {consumer, p.consumers, lane});
}

// Whether a length that this thread looks after, or that of its unit, is another than when `count` units were listed.
DEVICE bool is_stale(const DecodeParams& p, const Carved& c, int count, int helper) {
    bool stale = false;
    for (int b = helper; b < p.batch; b += kHelpers * 32) {
        const int splits = visible_pages(p, load_past_l1(p.seq_lens + b)).num_splits;
        stale |= splits != c.splits_before[b + 1] - c.splits_before[b];
    }
    if (helper < count) {
        const Unit& unit = c.fixed->units[helper];
        stale |= unit.seq_len != load_past_l1(p.seq_lens + unit.batch);
    }
    return stale;
}

// The warps that do not consume list this block's units from number `begin` on, at most kUnitTable; how many they are.
DEVICE int list_units(const DecodeParams& p, const Carved& c, int begin, int helper) {
    const int index = blockIdx.x + (begin + helper) * gridDim.x;
    const bool exists = helper < kUnitTable && index < p.kv_heads * c.splits_before[p.batch];
    if (exists) c.fixed->units[helper] = find_unit(p, c.splits_before, index);
    return count_among(kHelpers * 32, exists);
}

// Lists the first units before the kernel ahead has ended, from lengths that it may still be writing, and again if they were
// not what they are then. Nothing else of that kernel is read before it has ended.
DEVICE int list_first_units(const DecodeParams& p, const Carved& c, int helper, Producer& producer) {
    for (bool again = false;; again = true) {
        if (helper < 32) count_splits(p, c.splits_before, helper);
        count_among(kHelpers * 32, true);
        const int count = list_units(p, c, 0, helper);
        if (again) return count;
        wait_for_previous_kernel();
        start_next_kernel();
        if (helper < 32 && count > 0) producer.look_ahead(c.fixed->units[0]);
        if (count_among(kHelpers * 32, is_stale(p, c, count, helper)) == 0) return count;
        producer.forget();
    }
}

DEVICE void run_helper(const DecodeParams& p, const Carved& c, int warp, int lane) {
    Shared* s = c.fixed;
    const int helper = warp * 32 + lane;
    Producer producer(p, c, lane);
    for (int begin = 0, end;; begin = end) {
        end = begin + (begin == 0 ? list_first_units(p, c, helper, producer) : list_units(p, c, begin, helper));
        if (kWarpArrivals == 32 || helper == 0) {
            if (helper == 0) s->listed_end = end;
            barrier_arrive(shared_address(&s->listed));
        }
        if (begin == end) return;
        const bool is_last = is_last_unit(p, c, end - 1);
        if (warp == 0) {
            for (int n = begin; n < end; ++n) producer.fill(s->units[n % kUnitTable]);
            producer.finish();
        } else if (warp == 1) {
            prepare_units(p, s, begin, end, lane);
        } else {
            merge_units(p, c, begin, is_last ? end - 1 : end, {warp - 2, kMergers, lane});
        }
        if (is_last) return;
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__((kBlockConsumers + kHelpers) * 32, 1)
    decode_attention(const DecodeParams p) {
    const Carved c = carve(p);
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    if (lane == 0) initialise(p, c.fixed, warp, blockDim.x / 32);
    __syncthreads();
    // Consumers come first: schedulers favour older warps. Where registers are shifted helpers do, so that they are a warpgroup.
    const int first_helper = kShiftsRegisters ? 0 : p.consumers, first_consumer = kShiftsRegisters ? kHelpers : 0;
    if (warp >= first_helper && warp < first_helper + kHelpers) {
        if (kShiftsRegisters) lower_register_limit<kHelperRegisters>();
        run_helper(p, c, warp - first_helper, lane);
    } else {
        if (kShiftsRegisters) raise_register_limit<kConsumerRegisters>();
        run_consumer(p, c, warp - first_consumer, lane);
    }
}
