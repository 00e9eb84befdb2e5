// The producer warp: lists the items of the block's units and keeps the ring of stages full. Every lane has an item of its
// own, so that finding a page, waiting for a stage and starting its copies go on side by side.
#pragma once
#include "copy.cuh"
#include "shared.cuh"

struct Item {
    int page;
    int first_row;  // of the page
    bool is_half;
};

// Item number `index` of a unit: fp16 pages in front (sinks), sealed pages, fp16 pages behind (recent, open).
DEVICE Item find_item(const DecodeParams& p, const Unit& unit, int index) {
    constexpr int kHalfItems = kPageTokens / kHalfItemTokens;
    const SealedPages pages(p, unit.seq_len, unit.page_begin, unit.page_end);
    const int front = kHalfItems * (pages.begin - unit.page_begin);
    const int sealed = (kCoded ? kItemsPerPage : kHalfItems) * (pages.end - pages.begin);
    if (index < front)
        return {unit.page_begin + index / kHalfItems, index % kHalfItems * kHalfItemTokens, true};
    index -= front;
    if (index >= sealed) {
        index -= sealed;
        return {pages.end + index / kHalfItems, index % kHalfItems * kHalfItemTokens, true};
    }
    if (!kCoded) return {pages.begin + index / kHalfItems, index % kHalfItems * kHalfItemTokens, false};
    return {pages.begin + index / kItemsPerPage, index % kItemsPerPage * kItemTokens, false};
}

// An item on its way: what it is and the entry of the block table, still being fetched perhaps.
struct Errand {
    Item item;
    int entry;
    int kv_head;
    int seq_len;
    u32 number;
    bool wanted;
};

struct Producer {
    const DecodeParams& p;
    const Carved& shared;
    int lane;
    u32 items;        // numbered so far
    int items_ahead;  // of the unit that comes next, fetched before it was asked for
    Errand next;      // fetched ahead

    DEVICE Producer(const DecodeParams& params, const Carved& carved, int lane_id)
        : p(params), shared(carved), lane(lane_id) {
        forget();
    }
    // Back to the state before anything was fetched.
    DEVICE void forget() { items = items_ahead = 0, next.wanted = false; }
    // Looks up the first pages of a unit that may turn out to be another.
    DEVICE void look_ahead(const Unit& unit) {
        next = fetch(unit, 0);
        items_ahead = batch_size();
    }

    // No stage twice in a batch: its barrier could not tell the two fillings apart.
    DEVICE int batch_size() const { return min(32, p.stages); }

    DEVICE void fill(const Unit& unit) {
        for (int first = items_ahead; first < unit.num_items; first += batch_size()) {
            const Errand errand = fetch(unit, first);
            run(next);
            next = errand;
        }
        items_ahead = 0;
    }
    DEVICE void finish() {
        run(next);
        next.wanted = false;
    }

  private:
    DEVICE Errand fetch(const Unit& unit, int first) {
        const int listed = min(batch_size(), unit.num_items - first);
        Errand e;
        e.wanted = lane < listed;
        e.item = find_item(p, unit, first + lane);
        const int page = min(max(e.item.page, 0), p.max_pages - 1);  // a unit that is looked ahead for may be nonsense
        e.entry = e.wanted ? p.block_table[static_cast<long long>(unit.batch) * p.max_pages + page] : 0;
        e.kv_head = unit.kv_head;
        e.seq_len = unit.seq_len;
        e.number = items + lane;
        items += listed;
        return e;
    }

#if __CUDA_ARCH__ >= 900
    DEVICE void run(const Errand& e) {
        const RingPlace place = RingPlace::at(e.number, p.stages);
        const u32 empty = shared_address(&shared.fixed->empty[place.stage()]);
        bool waiting = e.wanted;
        while (__any_sync(kFullMask, waiting)) {
            if (waiting && barrier_poll(empty, place.phase() ^ 1)) {
                start(e, place, 0, 1);
                waiting = false;
            }
        }
    }
#else
    // Without bulk copies the whole warp copies one item after the other.
    DEVICE void run(const Errand& mine) {
        for (int i = 0; i < 32; ++i) {
            Errand e;
            e.wanted = __shfl_sync(kFullMask, mine.wanted, i);
            if (!e.wanted) return;
            e.item.page = __shfl_sync(kFullMask, mine.item.page, i);
            e.item.first_row = __shfl_sync(kFullMask, mine.item.first_row, i);
            e.item.is_half = __shfl_sync(kFullMask, mine.item.is_half, i);
            e.entry = __shfl_sync(kFullMask, mine.entry, i);
            e.kv_head = mine.kv_head, e.seq_len = mine.seq_len;
            e.number = __shfl_sync(kFullMask, mine.number, i);
            const RingPlace place = RingPlace::at(e.number, p.stages);
            barrier_wait(shared_address(&shared.fixed->empty[place.stage()]), place.phase() ^ 1);
            start(e, place, lane, 32);
        }
    }
#endif

    // Describes the item in its stage and copies it; `worker` of `workers` lanes share the copying.
    DEVICE void start(const Errand& e, const RingPlace& place, int worker, int workers) {
        const u32 to = shared.stages + place.stage() * p.stage_bytes;
        const u32 barrier = shared_address(&shared.fixed->full[place.stage()]);
        const int first_token = e.item.page * kPageTokens + e.item.first_row;
        const bool rows = e.item.is_half || !kCoded;
        if (worker == 0) {
            shared.fixed->headers[place.stage()] = {first_token, rows, window_begin(p, e.seq_len), e.seq_len};
            publish(shared_address(&shared.fixed->opened[place.stage()]), e.number);
        }
        const Copier copier{barrier, worker, workers};
        const u8* sealed = p.sealed_pool + (static_cast<long long>(e.entry) * p.kv_heads + e.kv_head) * kPageBytes;
        if (!rows) {
            copy_codes(copier, to, sealed, e.item.first_row / kItemTokens);
            return;
        }
        constexpr long long kHeadBytes = static_cast<long long>(kPageTokens) * kHalfRowBytes;
        const u8* k = e.item.is_half
                          ? p.open_pool + (static_cast<long long>(e.entry) * 2 * p.kv_heads + e.kv_head) * kHeadBytes
                          : sealed;
        const u8* v = k + (e.item.is_half ? p.kv_heads * kHeadBytes : kHeadBytes);
        const u32 bytes = min(kHalfItemTokens, e.seq_len - first_token) * kHalfRowBytes;
        copier.begin(2 * bytes);
        copier.copy(to, k + e.item.first_row * kHalfRowBytes, bytes);
        copier.copy(to + kHalfItemTokens * kHalfRowBytes, v + e.item.first_row * kHalfRowBytes, bytes);
        copier.end();
    }

    DEVICE void copy_codes(const Copier& copier, u32 to, const u8* from, int item) {
        constexpr u32 kParameterBytes = kKParameterBytes + kVParameterBytes;
        constexpr u32 kBytes = kKItemBytes + kVItemBytes + kParameterBytes;
        copier.begin(kBytes);
        if (kItemsPerPage == 1) {
            copier.copy(to, from, kBytes);
        } else {
            copier.copy(to, from + item * kKItemBytes, kKItemBytes);
            copier.copy(to + kKItemBytes, from + kKPageBytes + item * kVItemBytes, kVItemBytes);
            if (kParameterBytes)
                copier.copy(to + kKItemBytes + kVItemBytes, from + kKPageBytes + kVPageBytes, kParameterBytes);
        }
        copier.end();
    }
};
