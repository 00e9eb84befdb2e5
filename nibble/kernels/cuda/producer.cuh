// The producer warp: walks the block's units page by page and keeps the ring of stages full.
#pragma once
#include "copy.cuh"
#include "shared.cuh"

struct RingPlace {
    int stage = 0;
    u32 phase = 0;
    DEVICE void advance(int steps, int stages) {
        stage += steps;
        while (stage >= stages) {
            stage -= stages;
            phase ^= 1;
        }
    }
};

struct Producer {
    const DecodeParams& p;
    const Carved& shared;
    int lane;
    RingPlace place;

    DEVICE Producer(const DecodeParams& params, const Carved& carved, int lane_id)
        : p(params), shared(carved), lane(lane_id) {}

    DEVICE void fill(const Unit& unit) {
        const int* table = p.block_table + static_cast<long long>(unit.batch) * p.max_pages;
        const int sealed_end = first_recent_page(p, unit.seq_len);
        int entries = 0;
        for (int page = unit.page_begin; page < unit.page_end; ++page) {
            const int ahead = (page - unit.page_begin) & 31;
            if (ahead == 0) entries = page + lane < unit.page_end ? table[page + lane] : 0;
            const int entry = __shfl_sync(kFullMask, entries, ahead);
            const bool is_open = page < p.sink_pages || page >= sealed_end;
            if (is_open) {
                const long long page_head_bytes = static_cast<long long>(kPageTokens) * kHalfRowBytes;
                const u8* k = p.open_pool + (static_cast<long long>(entry) * 2 * p.kv_heads + unit.kv_head) * page_head_bytes;
                fill_half_page(unit, page, k, k + p.kv_heads * page_head_bytes);
            } else {
                const u8* sealed =
                    p.sealed_pool + (static_cast<long long>(entry) * p.kv_heads + unit.kv_head) * kPageBytes;
                if (kCoded)
                    fill_sealed_page(unit, page, sealed);
                else
                    fill_half_page(unit, page, sealed, sealed + kPageTokens * kHalfRowBytes);
            }
        }
    }

  private:
    // Waits for the stage and describes what is about to lie in it.
    DEVICE u32 open_stage(const Unit& unit, int first_token, bool is_half, u32 bytes) {
        Shared* s = shared.fixed;
        barrier_wait(shared_address(&s->empty[place.stage]), place.phase ^ 1);
        if (lane == 0) {
            ItemHeader& header = s->headers[place.stage];
            header.first_token = first_token;
            header.is_half = is_half;
            header.token_begin = window_begin(p, unit.seq_len);
            header.token_end = unit.seq_len;
        }
        begin_fill(full_barrier(), bytes, lane);
        return shared.stages + place.stage * p.stage_bytes;
    }
    DEVICE u32 full_barrier() const { return shared_address(&shared.fixed->full[place.stage]); }
    DEVICE void close_stage() {
        end_fill(full_barrier());
        place.advance(1, p.stages);
    }

    DEVICE void fill_sealed_page(const Unit& unit, int page, const u8* from) {
        constexpr u32 kParameterBytes = kKParameterBytes + kVParameterBytes;
#pragma unroll 1
        for (int item = 0; item < kItemsPerPage; ++item) {
            const u32 bytes = kKItemBytes + kVItemBytes + kParameterBytes;
            const u32 to = open_stage(unit, page * kPageTokens + item * kItemTokens, false, bytes);
            const u32 barrier = full_barrier();
            if (kItemsPerPage == 1) {
                copy_block(to, from, bytes, barrier, lane);
            } else {
                copy_block(to, from + item * kKItemBytes, kKItemBytes, barrier, lane);
                copy_block(to + kKItemBytes, from + kKPageBytes + item * kVItemBytes, kVItemBytes, barrier, lane);
                if (kParameterBytes)
                    copy_block(to + kKItemBytes + kVItemBytes, from + kKPageBytes + kVPageBytes, kParameterBytes,
                               barrier, lane);
            }
            close_stage();
        }
    }

    // 16 rows of K, then 16 rows of V (the last item of a sequence has fewer).
    DEVICE void fill_half_page(const Unit& unit, int page, const u8* k, const u8* v) {
#pragma unroll 1
        for (int row = 0; row < kPageTokens; row += kHalfItemTokens) {
            const int rows = min(kHalfItemTokens, unit.seq_len - page * kPageTokens - row);
            if (rows <= 0) break;
            const u32 to = open_stage(unit, page * kPageTokens + row, true, 2 * rows * kHalfRowBytes);
            copy_block(to, k + row * kHalfRowBytes, rows * kHalfRowBytes, full_barrier(), lane);
            copy_block(to + kHalfItemTokens * kHalfRowBytes, v + row * kHalfRowBytes, rows * kHalfRowBytes,
                       full_barrier(), lane);
            close_stage();
        }
    }
};
