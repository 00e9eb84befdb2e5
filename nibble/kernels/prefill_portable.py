"""Prefill attention in plain Triton, for every GPU but Hopper and for the interpreter on a CPU.

The same tiles as the Hopper kernel: a program owns one page of queries of two query heads that share a KV head, stacked
to 128 rows, and walks the key pages from the newest to the oldest, one page a step. A page is read from the open pool
or from the scratch; the arithmetic is the same, and only the first step, on the queries' own page, has a causal mask.
"""

from __future__ import annotations

# Functions for the device have no types to check: Triton traces them.
# mypy: disable-error-code="no-untyped-def"
import triton
import triton.language as tl

PAGE = tl.constexpr(64)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LARGEST_QUERY = tl.constexpr(32768.0)


@triton.jit
def attend_page(
    q, row_max, row_sum, acc, source, page, positions, scale,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, WINDOW: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax over one page. source: K of this head in that page; V follows KV_HEADS later."""
    tokens = tl.arange(0, PAGE)
    channels = tl.arange(0, D_PAD)
    inside = (tokens < PAGE)[:, None] & (channels < D)[None, :]
    places = tokens[:, None] * D + channels[None, :]
    k = tl.load(source + places, mask=inside, other=0.0)
    s = tl.dot(q, tl.trans(k)) * scale
    if DIAGONAL or WINDOW > 0:
        distance = positions[:, None] - (page * PAGE + tokens)[None, :]
        allowed = distance >= 0
        if WINDOW > 0:
            allowed = allowed & (distance < WINDOW)
        s = tl.where(allowed, s, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(s, 1))
    alpha = tl.exp2(row_max - new_max)
    p = tl.exp2(s - new_max[:, None])
    row_sum = row_sum * alpha + tl.sum(p, 1)
    v = tl.load(source + KV_HEADS * PAGE * D + places, mask=inside, other=0.0)
    acc = tl.dot(p.to(tl.float16), v, acc * alpha[:, None])
    return new_max, row_sum, acc


@triton.jit
def page_source(
    open_pool, scratch, table, page, query_page, head, far_base, tail_page, tail_slot,
    KV_HEADS: tl.constexpr, D: tl.constexpr, SINKS: tl.constexpr, RECENT: tl.constexpr,
):  # fmt: skip
    """Where K of a page lies, as the queries of `query_page` see it."""
    is_far = (page >= SINKS) & (query_page - page > RECENT)
    in_scratch = is_far | (page == tail_page)
    slot = tl.where(is_far, far_base + page, tail_slot)
    open_page = tl.load(table + page)
    index = tl.where(in_scratch, slot, open_page).to(tl.int64)
    base = tl.where(in_scratch, scratch, open_pool)
    return base + (index * 2 * KV_HEADS + head) * (PAGE * D)


@triton.jit(do_not_specialize=["num_query_tiles", "max_pages"])
def prefill_portable_kernel(
    open_pool, scratch, q_ptr, out_ptr, lse_ptr, tiles, sequences, open_table, num_query_tiles, max_pages,
    softmax_scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, SINKS: tl.constexpr,
    RECENT: tl.constexpr, WINDOW: tl.constexpr, NORMALISE: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Grid: pairs of query heads (fastest), query tiles, KV heads."""
    PAIRS: tl.constexpr = (GROUP + 1) // 2
    program = tl.program_id(0)
    pair = program % PAIRS
    tile = (program // PAIRS) % num_query_tiles
    head = program // (PAIRS * num_query_tiles)
    sequence = tl.load(tiles + tile * 2)
    query_page = tl.load(tiles + tile * 2 + 1)
    facts = sequences + sequence * 8
    query_row = tl.load(facts)
    first_position = tl.load(facts + 1)
    seq_len = tl.load(facts + 2)
    far_base = tl.load(facts + 3)
    tail_page = tl.load(facts + 4)
    tail_slot = tl.load(facts + 5)
    table = open_table + sequence * max_pages

    rows = tl.arange(0, 2 * PAGE)
    in_group = pair * 2 + rows // PAGE
    positions = query_page * PAGE + rows % PAGE
    valid = (positions >= first_position) & (positions < seq_len) & (in_group < GROUP)
    heads = (positions + query_row - first_position).to(tl.int64) * (GROUP * KV_HEADS) + head * GROUP + in_group
    channels = tl.arange(0, D_PAD)
    places = heads[:, None] * D + channels[None, :]
    inside = valid[:, None] & (channels < D)[None, :]
    q = tl.load(q_ptr + places, mask=inside, other=0.0)
    scale = softmax_scale * LOG2_E
    if NORMALISE:
        q = q.to(tl.float32)
        largest = tl.max(tl.max(tl.abs(q), 1), 0)
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        up = tl.where(largest > LARGEST_QUERY, power * (1.0 / 16384.0), 1.0)
        q = q / up
        scale = scale * up
    q = q.to(tl.float16)

    row_max = tl.full([2 * PAGE], float("-inf"), tl.float32)
    row_sum = tl.zeros([2 * PAGE], tl.float32)
    acc = tl.zeros([2 * PAGE, D_PAD], tl.float32)
    source = page_source(
        open_pool, scratch, table, query_page, query_page, head, far_base, tail_page, tail_slot, KV_HEADS, D, SINKS,
        RECENT,
    )  # fmt: skip
    row_max, row_sum, acc = attend_page(
        q, row_max, row_sum, acc, source, query_page, positions, scale, KV_HEADS, D, D_PAD, WINDOW, True
    )
    num_older = query_page
    if WINDOW > 0:
        num_older = query_page - tl.maximum(query_page * PAGE - (WINDOW - 1), 0) // PAGE
    for step in range(num_older):
        page = query_page - 1 - step
        source = page_source(
            open_pool, scratch, table, page, query_page, head, far_base, tail_page, tail_slot, KV_HEADS, D, SINKS,
            RECENT,
        )  # fmt: skip
        row_max, row_sum, acc = attend_page(
            q, row_max, row_sum, acc, source, page, positions, scale, KV_HEADS, D, D_PAD, WINDOW, False
        )

    acc = acc / row_sum[:, None]
    tl.store(out_ptr + places, acc.to(out_ptr.dtype.element_ty), mask=inside)
    if HAS_LSE:
        tl.store(lse_ptr + heads, row_max * LN_2 + tl.log(row_sum), mask=valid)
