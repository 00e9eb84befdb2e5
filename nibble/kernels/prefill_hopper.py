"""Prefill attention on Hopper: a flash-attention tile kernel with one loading warp and two computing warpgroups.

A computing warpgroup owns one page of queries (64 tokens) of one query head. All its rows lie in one page, so whether a
key page is seen in fp16 or quantized is one answer for the warpgroup, and that answer only moves the address that the
loading warp reads: an open page of the pool, or a page of the scratch that the dequantize pass wrote.

    loading warp       K tile, V tile -> shared memory (TMA, a ring of stages, newest keys first)
    warpgroups 0, 1    S = Q K^T of the next tile while the last P V is under way, then softmax

The two warpgroups share every tile. They are two heads of one GQA group on one page, or, without groups, one head on
two neighbouring pages: then the page that is recent to the older one and far to the newer one (the boundary) comes
twice, once in each form, and masks let each see its own. Masks are applied only near the diagonal, and everywhere with
a sliding window. Written in Gluon, Triton's layer with explicit layouts, barriers and warp roles.
"""

from __future__ import annotations

# Functions for the device have no types to check: Triton traces them.
# mypy: disable-error-code="no-untyped-def"
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nibble.kernels.prefill_gluon import reinterpret, start_copy, wait_for_warpgroup

PAGE = gl.constexpr(64)
BOX_COLUMNS = gl.constexpr(64)  # a TMA box is 64 tokens x 64 channels: 128-byte rows, one swizzle pattern
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
LARGEST_QUERY = gl.constexpr(32768.0)  # bf16 queries past this are brought into the range of fp16 by a power of two


@gluon.jit
def start_page_copy(
    descriptors, boxes, first_box, barrier, tensor, page, is_far, head, table, scratch_places,
    KV_HEADS: gl.constexpr, PAGES: gl.constexpr, COLUMN_BOXES: gl.constexpr,
):  # fmt: skip
    """Start the copies of one page of K (tensor 0) or V (tensor 1) into its boxes of a tile."""
    far_base, tail_page, tail_slot = scratch_places
    if is_far | (page == tail_page):
        slot = gl.where(is_far, far_base + page, tail_slot)
        row = ((slot * 2 + tensor) * KV_HEADS + head) * PAGE
        for column in gl.static_range(COLUMN_BOXES):
            box = boxes.index(first_box + column * PAGES)
            start_copy(descriptors[1], [row, column * BOX_COLUMNS], barrier, box)
    else:
        row = ((gl.load(table + page) * 2 + tensor) * KV_HEADS + head) * PAGE
        for column in gl.static_range(COLUMN_BOXES):
            box = boxes.index(first_box + column * PAGES)
            start_copy(descriptors[0], [row, column * BOX_COLUMNS], barrier, box)


@gluon.jit
def locate_step(step, walk):
    """Whether a step brings the boundary page once more, in its other form, and the tile of any other step."""
    first_tile, _, num_near, boundary, _, _ = walk
    has_boundary = boundary >= 0
    again = (step == num_near) & has_boundary
    return again, first_tile - step + ((step > num_near) & has_boundary).to(gl.int32)


@gluon.jit
def load_tiles(
    descriptors, k_boxes, v_boxes, k_full, k_empty, v_full, v_empty, table, scratch_places, head, query_page, walk,
    KV_HEADS: gl.constexpr, SINKS: gl.constexpr, RECENT: gl.constexpr, PAGES: gl.constexpr,
    COLUMN_BOXES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp: fill the ring, newest tile first."""
    _, num_steps, _, boundary, oldest_page, newest_page = walk
    BOXES: gl.constexpr = PAGES * COLUMN_BOXES
    TILE_BYTES: gl.constexpr = BOXES * PAGE * BOX_COLUMNS * 2
    for step in range(num_steps):
        stage = step % STAGES
        phase = (step // STAGES) & 1
        again, tile = locate_step(step, walk)
        for tensor in gl.static_range(2):
            full = v_full.index(stage) if tensor else k_full.index(stage)
            empty = v_empty.index(stage) if tensor else k_empty.index(stage)
            boxes = v_boxes if tensor else k_boxes
            mbarrier.wait(empty, phase ^ 1)
            mbarrier.expect(full, TILE_BYTES)
            for half in gl.static_range(PAGES):
                # A tile may reach past the newest page or below the window: any page will do there, it is masked.
                page = gl.maximum(gl.minimum(tile * PAGES + half, newest_page), oldest_page)
                page = gl.where(again, boundary, page)
                is_far = again | ((page >= SINKS) & (query_page - page > RECENT))
                start_page_copy(
                    descriptors, boxes, stage * BOXES + half, full, tensor, page, is_far, head, table, scratch_places,
                    KV_HEADS, PAGES, COLUMN_BOXES,
                )  # fmt: skip


@gluon.jit
def mask_scores(
    s, positions, step, warpgroup, walk, BLOCK_N: gl.constexpr, WINDOW: gl.constexpr, S_LAYOUT: gl.constexpr
):
    """Minus infinity for the keys of a step that a query may not attend to, or not in this form."""
    _, _, _, boundary, _, _ = walk
    again, tile = locate_step(step, walk)
    first_key = gl.where(again, boundary * PAGE, tile * BLOCK_N)
    keys = first_key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S_LAYOUT))
    if warpgroup == 1:
        shown = ((keys // PAGE) == boundary) == again
    else:
        shown = (keys >= 0) & (again == 0)
    distance = positions[:, None] - keys[None, :]
    allowed = (distance >= 0) & shown[None, :]
    if WINDOW > 0:
        allowed = allowed & (distance < WINDOW)
    return gl.where(allowed, s, float("-inf"))


@gluon.jit
def advance(
    step, warpgroup, q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, positions, walk, scale,
    p_operand, row_max, row_sum, acc,
    STAGES: gl.constexpr, WINDOW: gl.constexpr, MASKED: gl.constexpr, BLOCK_N: gl.constexpr, S_LAYOUT: gl.constexpr,
    O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """One step of the online softmax: S of this step's tile, and P V of the step before it."""
    stage = step % STAGES
    phase = (step // STAGES) & 1
    before = (step - 1) % STAGES
    phase_before = ((step - 1) // STAGES) & 1
    s_zero = gl.zeros([PAGE, BLOCK_N], gl.float32, S_LAYOUT)
    mbarrier.wait(k_full.index(stage), phase)
    s_token = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), s_zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), phase_before)
    acc_token = warpgroup_mma(p_operand, v_tiles.index(before), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s_token])
    wait_for_warpgroup()
    mbarrier.arrive(k_empty.index(stage), count=1)
    if MASKED:
        s = mask_scores(s, positions, step, warpgroup, walk, BLOCK_N, WINDOW, S_LAYOUT)
    new_max = gl.maximum(row_max, gl.max(s, 1))
    alpha = gl.exp2((row_max - new_max) * scale)
    p = gl.exp2(s * scale - (new_max * scale)[:, None])
    row_sum = row_sum * alpha + gl.sum(p, 1)
    acc = warpgroup_mma_wait(0, deps=[acc_token])
    wait_for_warpgroup()
    mbarrier.arrive(v_empty.index(before), count=1)
    acc = acc * gl.convert_layout(alpha, O_LAYOUT)[:, None]
    return gl.convert_layout(p.to(gl.float16), P_LAYOUT), new_max, row_sum, acc


@gluon.jit
def attend(
    warpgroup, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, q_ptr, out_ptr, lse_ptr, chunk, head, pair,
    query_page, walk, softmax_scale,
    GROUP: gl.constexpr, Q_HEADS: gl.constexpr, D: gl.constexpr, D_PAD: gl.constexpr, PAGES: gl.constexpr,
    STAGES: gl.constexpr, WINDOW: gl.constexpr, PAGE_PAIRS: gl.constexpr, NORMALISE: gl.constexpr,
    HAS_LSE: gl.constexpr,
):  # fmt: skip
    """A computing warpgroup: one page of queries of one head."""
    BLOCK_N: gl.constexpr = PAGES * PAGE
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_PAD, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    query_row, first_position, seq_len = chunk
    _, num_steps, num_near, boundary, _, _ = walk

    if PAGE_PAIRS:
        q_head = head
        first = (query_page + warpgroup) * PAGE
        low = first_position
    else:
        in_group = pair * 2 + warpgroup
        q_head = head * GROUP + in_group
        first = query_page * PAGE
        # The last pair of an odd group has one head: its other half has no rows.
        low = gl.where(in_group < GROUP, first_position, seq_len)
    row_shift = query_row - first_position

    # Queries, once: to fp16 and into shared memory.
    rows = first + gl.arange(0, PAGE, layout=gl.SliceLayout(1, Q_LAYOUT))
    columns = gl.arange(0, D_PAD, layout=gl.SliceLayout(0, Q_LAYOUT))
    offsets = ((rows + row_shift).to(gl.int64) * Q_HEADS + q_head) * D
    q_mask = ((rows >= low) & (rows < seq_len))[:, None] & (columns < D)[None, :]
    q = gl.load(q_ptr + offsets[:, None] + columns[None, :], mask=q_mask, other=0.0)
    scale = softmax_scale * LOG2_E
    if NORMALISE:
        q = q.to(gl.float32)
        largest = gl.max(gl.max(gl.abs(q), 1), 0)
        power = (largest.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
        up = gl.where(largest > LARGEST_QUERY, power * (1.0 / 16384.0), 1.0)
        q = q / up
        scale = scale * up
    q_tile = q_tiles.index(warpgroup)
    q_tile.store(q.to(gl.float16))
    fence_async_shared()
    wait_for_warpgroup()

    # The first tile has the diagonal: every row sees a key there, and its maximum is finite.
    positions = first + gl.arange(0, PAGE, layout=S_ROWS)
    s_zero = gl.zeros([PAGE, BLOCK_N], gl.float32, S_LAYOUT)
    acc = gl.zeros([PAGE, D_PAD], gl.float32, O_LAYOUT)
    mbarrier.wait(k_full.index(0), 0)
    s = warpgroup_mma(q_tile, k_tiles.index(0).permute((1, 0)), s_zero, use_acc=False)
    wait_for_warpgroup()
    mbarrier.arrive(k_empty.index(0), count=1)
    s = mask_scores(s, positions, 0, warpgroup, walk, BLOCK_N, WINDOW, S_LAYOUT)
    row_max = gl.max(s, 1)
    p = gl.exp2(s * scale - (row_max * scale)[:, None])
    row_sum = gl.sum(p, 1)
    p_operand = gl.convert_layout(p.to(gl.float16), P_LAYOUT)

    if PAGE_PAIRS:
        num_masked = num_near + (boundary >= 0).to(gl.int32)
        for step in range(1, num_masked):
            p_operand, row_max, row_sum, acc = advance(
                step, warpgroup, q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, positions, walk, scale,
                p_operand, row_max, row_sum, acc, STAGES, WINDOW, True, BLOCK_N, S_LAYOUT, O_ROWS, P_LAYOUT,
            )  # fmt: skip
    else:
        num_masked = 1
    for step in range(num_masked, num_steps):
        p_operand, row_max, row_sum, acc = advance(
            step, warpgroup, q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, positions, walk, scale,
            p_operand, row_max, row_sum, acc, STAGES, WINDOW, WINDOW > 0, BLOCK_N, S_LAYOUT, O_ROWS, P_LAYOUT,
        )  # fmt: skip

    last = (num_steps - 1) % STAGES
    mbarrier.wait(v_full.index(last), ((num_steps - 1) // STAGES) & 1)
    acc = warpgroup_mma(p_operand, v_tiles.index(last), acc)
    acc = acc * (1.0 / gl.convert_layout(row_sum, O_ROWS))[:, None]

    out_rows = first + gl.arange(0, PAGE, layout=O_ROWS)
    out_columns = gl.arange(0, D_PAD, layout=gl.SliceLayout(0, O_LAYOUT))
    out_offsets = ((out_rows + row_shift).to(gl.int64) * Q_HEADS + q_head) * D
    out_mask = ((out_rows >= low) & (out_rows < seq_len))[:, None] & (out_columns < D)[None, :]
    gl.store(out_ptr + out_offsets[:, None] + out_columns[None, :], acc.to(out_ptr.dtype.element_ty), mask=out_mask)
    if HAS_LSE:
        lse = row_max * (scale * LN_2) + gl.log(row_sum)
        lse_offsets = (positions + row_shift).to(gl.int64) * Q_HEADS + q_head
        gl.store(lse_ptr + lse_offsets, lse, mask=(positions >= low) & (positions < seq_len))


@gluon.jit
def plan_walk(
    query_page, seq_len, PAGES: gl.constexpr, SINKS: gl.constexpr, RECENT: gl.constexpr, WINDOW: gl.constexpr,
    PAGE_PAIRS: gl.constexpr,
):  # fmt: skip
    """The steps over the keys: first (newest) tile, steps, steps before the boundary's second coming, boundary page or
    -1, oldest and newest page that are there to be read."""
    oldest_page = query_page * 0
    if WINDOW > 0:
        oldest_page = gl.maximum(query_page * PAGE - (WINDOW - 1), 0) // PAGE
    first_tile = query_page // PAGES
    num_steps = first_tile - oldest_page // PAGES + 1
    newest_page = query_page
    boundary = query_page * 0 - 1
    num_near = query_page * 0 + 1
    if PAGE_PAIRS:
        newest_page = gl.minimum(query_page + 1, (seq_len - 1) // PAGE)
        page = query_page - RECENT
        has_boundary = (page >= gl.maximum(oldest_page, SINKS)) & (newest_page > query_page)
        boundary = gl.where(has_boundary, page, -1)
        num_near = gl.where(has_boundary, first_tile - page // PAGES + 1, 1)
        num_steps = num_steps + has_boundary.to(gl.int32)
    return first_tile, num_steps, num_near, boundary, oldest_page, newest_page


@gluon.jit(do_not_specialize=["num_query_tiles", "max_pages"])
def prefill_hopper_kernel(
    desc_open, desc_far, q_ptr, out_ptr, lse_ptr, tiles, sequences, open_table, num_query_tiles, max_pages,
    softmax_scale,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, D_PAD: gl.constexpr, PAGES: gl.constexpr,
    STAGES: gl.constexpr, SINKS: gl.constexpr, RECENT: gl.constexpr, WINDOW: gl.constexpr,
    PAGE_PAIRS: gl.constexpr, NORMALISE: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Grid: pairs of query heads (fastest), query tiles, KV heads. Tiles are even pages when PAGE_PAIRS is set."""
    PAIRS: gl.constexpr = (GROUP + 1) // 2
    Q_HEADS: gl.constexpr = GROUP * KV_HEADS
    COLUMN_BOXES: gl.constexpr = D_PAD // BOX_COLUMNS
    program = gl.program_id(0)
    pair = program % PAIRS
    tile = (program // PAIRS) % num_query_tiles
    head = program // (PAIRS * num_query_tiles)
    sequence = gl.load(tiles + tile * 2)
    query_page = gl.load(tiles + tile * 2 + 1)
    facts = sequences + sequence * 8
    chunk = (gl.load(facts), gl.load(facts + 1), gl.load(facts + 2))
    scratch_places = (gl.load(facts + 3), gl.load(facts + 4), gl.load(facts + 5))
    table = open_table + sequence * max_pages
    walk = plan_walk(query_page, chunk[2], PAGES, SINKS, RECENT, WINDOW, PAGE_PAIRS)

    TILE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tiles = gl.allocate_shared_memory(gl.float16, [2, PAGE, D_PAD], TILE_LAYOUT)
    k_tiles = gl.allocate_shared_memory(gl.float16, [STAGES, PAGES * PAGE, D_PAD], TILE_LAYOUT)
    v_tiles = gl.allocate_shared_memory(gl.float16, [STAGES, PAGES * PAGE, D_PAD], TILE_LAYOUT)
    # The same memory as boxes: of a tile, first the pages of channels 0..63, then those of channels 64..127, ...
    BOX_SHAPE: gl.constexpr = [STAGES * PAGES * COLUMN_BOXES, PAGE, BOX_COLUMNS]
    k_boxes = reinterpret(k_tiles, BOX_SHAPE, TILE_LAYOUT)
    v_boxes = reinterpret(v_tiles, BOX_SHAPE, TILE_LAYOUT)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)

    # Constants lose their constness in a named tuple, so the arguments are spelled out for each role.
    gl.warp_specialize(
        [
            (
                attend,
                (
                    0, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, q_ptr, out_ptr, lse_ptr, chunk,
                    head, pair, query_page, walk, softmax_scale,
                    GROUP, Q_HEADS, D, D_PAD, PAGES, STAGES, WINDOW, PAGE_PAIRS, NORMALISE, HAS_LSE,
                ),
            ),
            (
                attend,
                (
                    1, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, q_ptr, out_ptr, lse_ptr, chunk,
                    head, pair, query_page, walk, softmax_scale,
                    GROUP, Q_HEADS, D, D_PAD, PAGES, STAGES, WINDOW, PAGE_PAIRS, NORMALISE, HAS_LSE,
                ),
            ),
            (
                load_tiles,
                (
                    (desc_open, desc_far), k_boxes, v_boxes, k_full, k_empty, v_full, v_empty, table, scratch_places,
                    head, query_page, walk, KV_HEADS, SINKS, RECENT, PAGES, COLUMN_BOXES, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def hopper_tiles(head_dim: int) -> dict[str, Any]:
    """Key pages a tile and stages of the ring that fit shared memory."""
    padded = max(64, triton.next_power_of_2(head_dim))
    pages, stages = {64: (2, 4), 128: (2, 2), 256: (1, 2)}[padded]
    return {"PAGES": pages, "STAGES": stages}


def describe_pages(pool: torch.Tensor) -> TensorDescriptor:
    """A TMA descriptor of a pool of fp16 pages as rows of channels, fetched in boxes of 64 x 64."""
    head_dim = pool.shape[-1]
    rows = pool.numel() // head_dim
    layout = gl.NVMMASharedLayout(128, 16, 2)
    return TensorDescriptor(pool, [rows, head_dim], [head_dim, 1], [64, 64], layout)
