// Who does what: every sequence and KV head is cut into splits of a size that depends on its length alone; a unit of
// work is one split. Units are numbered KV head first, then split, then sequence, and dealt to the blocks in turn: the heads of
// a page lie together in memory and are read at about the same time.
#pragma once
#include "config.cuh"

// Without a size that was asked for, a sequence of up to kMostSplitPages is whole, and a longer one is cut into kSplitsAimed
// splits, within bounds. nibble/kernels/decode.py has the same rule.
constexpr int kSplitsAimed = 16;
constexpr int kFewestSplitPages = 32;
constexpr int kMostSplitPages = 64;

// A split's share is measured in quarters of a sealed page's bytes: fp16 pages are larger, and a sequence's last split holds
// several.
constexpr int kSealedQuarters = 4;
constexpr int kHalfQuarters = (kSealedQuarters * kHalfPageBytes + kPageBytes / 2) / kPageBytes;

struct Unit {
    int batch;
    int kv_head;
    int split;
    int num_splits;
    int page_begin;
    int page_end;
    int num_items;
    int seq_len;
};

// a / b, for a below 2^20: exact, since half a unit keeps the quotient away from whole numbers.
DEVICE int divide(int a, int b) { return static_cast<int>(__fdividef(static_cast<float>(a) + 0.5f, static_cast<float>(b))); }

struct Visible {
    int page_begin;  // pages [page_begin, page_end) hold tokens that the query sees
    int page_end;
    int num_splits;
};

DEVICE int window_begin(const DecodeParams& p, int seq_len) {
    return p.sliding_window > 0 && seq_len > p.sliding_window ? seq_len - p.sliding_window : 0;
}
DEVICE int first_recent_page(const DecodeParams& p, int seq_len) {
    return max(p.sink_pages, (seq_len - 1) / kPageTokens - p.recent_pages);
}
DEVICE Visible visible_pages(const DecodeParams& p, int seq_len) {
    Visible v;
    v.page_begin = window_begin(p, seq_len) / kPageTokens;
    v.page_end = (seq_len + kPageTokens - 1) / kPageTokens;
    const int pages = v.page_end - v.page_begin;
    const int aimed = min(max((pages + kSplitsAimed - 1) / kSplitsAimed, kFewestSplitPages), kMostSplitPages);
    const int size = p.split_pages > 0 ? p.split_pages : pages <= kMostSplitPages ? kMostSplitPages : aimed;
    v.num_splits = max(1, divide(pages + size - 1, size));
    return v;
}

// Those of the pages [begin, end) that the query sees sealed; fp16 pages lie before and behind.
struct SealedPages {
    int begin;
    int end;

    DEVICE SealedPages(const DecodeParams& p, int seq_len, int page_begin, int page_end)
        : begin(min(max(page_begin, p.sink_pages), page_end)),
          end(max(begin, min(page_end, first_recent_page(p, seq_len)))) {}
};

// The first page of a split, page_end behind the last: every split has its share of the bytes, to half a page.
DEVICE int first_page_of(const DecodeParams& p, const Visible& v, int seq_len, int split) {
    if (split == v.num_splits) return v.page_end;
    const SealedPages pages(p, seq_len, v.page_begin, v.page_end);
    const int front = kHalfQuarters * (pages.begin - v.page_begin), sealed = kSealedQuarters * (pages.end - pages.begin);
    const int total = front + sealed + kHalfQuarters * (v.page_end - pages.end);
    int at = split * divide(total + v.num_splits - 1, v.num_splits);
    if (at < front) return v.page_begin + (at + kHalfQuarters / 2) / kHalfQuarters;
    at -= front;
    if (at < sealed) return pages.begin + (at + kSealedQuarters / 2) / kSealedQuarters;
    return min(v.page_end, pages.end + (at - sealed + kHalfQuarters / 2) / kHalfQuarters);
}

// splits_before[b]: splits (of one KV head) of the sequences before b; [batch] is their total. One warp.
DEVICE void count_splits(const DecodeParams& p, int* splits_before, int lane) {
    int total = 0;
    for (int base = 0; base < p.batch; base += 32) {
        const int b = base + lane;
        int sum = b < p.batch ? visible_pages(p, load_past_l1(p.seq_lens + b)).num_splits : 0;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int left = __shfl_up_sync(kFullMask, sum, step);
            if (lane >= step) sum += left;
        }
        if (b < p.batch) splits_before[b + 1] = total + sum;
        total += __shfl_sync(kFullMask, sum, 31);
    }
    if (lane == 0) splits_before[0] = 0;
}

DEVICE int items_of(const DecodeParams& p, const Unit& unit) {
    const int valid_pages = max(0, unit.page_end - unit.page_begin);
    const int sealed_begin = max(unit.page_begin, p.sink_pages);
    const int sealed_end = min(unit.page_end, first_recent_page(p, unit.seq_len));
    const int sealed = max(0, sealed_end - sealed_begin);
    int items = sealed * (kCoded ? kItemsPerPage : kPageTokens / kHalfItemTokens);
    items += (valid_pages - sealed) * (kPageTokens / kHalfItemTokens);
    if (valid_pages > 0) {  // the last page may be partly filled
        const int missing = max(0, unit.page_end * kPageTokens - unit.seq_len);
        items -= missing / kHalfItemTokens;
    }
    return items;
}

DEVICE Unit find_unit(const DecodeParams& p, const int* splits_before, int index) {
    int low = 0, high = p.batch;  // the last b with kv_heads * splits_before[b] <= index
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (p.kv_heads * splits_before[middle] <= index)
            low = middle;
        else
            high = middle;
    }
    Unit unit;
    unit.batch = low;
    unit.seq_len = load_past_l1(p.seq_lens + low);
    const Visible v = visible_pages(p, unit.seq_len);
    const int inside = index - p.kv_heads * splits_before[low];
    unit.split = divide(inside, p.kv_heads);
    unit.kv_head = inside - unit.split * p.kv_heads;
    unit.num_splits = v.num_splits;
    unit.page_begin = first_page_of(p, v, unit.seq_len, unit.split);
    unit.page_end = first_page_of(p, v, unit.seq_len, unit.split + 1);
    unit.num_items = items_of(p, unit);
    return unit;
}
