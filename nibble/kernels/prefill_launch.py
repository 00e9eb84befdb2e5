"""Launches of the prefill kernels: the dequantize pass, then the tile kernel of this GPU. Needs Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton

from nibble.kernels.prefill_dequantize import fill_scratch
from nibble.kernels.prefill_plan import PrefillPlan
from nibble.kernels.prefill_portable import prefill_portable_kernel

if TYPE_CHECKING:
    from nibble.kernels.prefill import PrefillCache

HOPPER = (9, 0)
HOPPER_HEAD_DIMS = range(64, 257)


def launch_prefill(
    q: torch.Tensor,
    cache: PrefillCache,
    plan: PrefillPlan,
    static: list[torch.Tensor],
    softmax_scale: float,
    with_log_sum_exp: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output like q and log-sum-exp fp32 [queries, q_heads] (no rows when it is not wanted). Arguments are checked."""
    out = torch.empty_like(q)
    log_sum_exp = q.new_empty((q.shape[0] if with_log_sum_exp else 0, q.shape[1]), dtype=torch.float32)
    if not plan.tiles.shape[0]:
        return out, log_sum_exp
    scratch = fill_scratch(cache, plan, static)
    launch = launch_hopper if runs_on_hopper(q) else launch_portable
    launch(q, cache, plan, scratch, out, log_sum_exp, softmax_scale)
    return out, log_sum_exp


def runs_on_hopper(q: torch.Tensor) -> bool:
    """True when the Hopper kernel serves this device and head size."""
    return q.is_cuda and torch.cuda.get_device_capability(q.device) == HOPPER and q.shape[2] in HOPPER_HEAD_DIMS


def launch_portable(
    q: torch.Tensor,
    cache: PrefillCache,
    plan: PrefillPlan,
    scratch: torch.Tensor,
    out: torch.Tensor,
    log_sum_exp: torch.Tensor,
    softmax_scale: float,
) -> None:
    """The plain Triton kernel."""
    constants = _constants(q, cache, plan, log_sum_exp)
    prefill_portable_kernel[_grid(q, cache, plan.tiles)](
        cache.open_pool, scratch, q, out, log_sum_exp, plan.tiles, plan.sequences, cache.open_table,
        plan.tiles.shape[0], cache.open_table.shape[1], softmax_scale,
        **constants, num_warps=8, num_stages=1 if constants["D_PAD"] > 128 else 2,
    )  # fmt: skip


def launch_hopper(
    q: torch.Tensor,
    cache: PrefillCache,
    plan: PrefillPlan,
    scratch: torch.Tensor,
    out: torch.Tensor,
    log_sum_exp: torch.Tensor,
    softmax_scale: float,
    **tuning: Any,
) -> None:
    """The Gluon kernel. tuning: constants of the kernel that replace those of `hopper_tiles`."""
    from nibble.kernels.prefill_hopper import describe_pages, hopper_tiles, prefill_hopper_kernel

    constants = {**_constants(q, cache, plan, log_sum_exp), **hopper_tiles(q.shape[2]), **tuning}
    constants["PAGE_PAIRS"] = constants["GROUP"] == 1 and constants["PAGES"] == 2
    tiles = plan.page_pairs if constants["PAGE_PAIRS"] else plan.tiles
    prefill_hopper_kernel[_grid(q, cache, tiles)](
        describe_pages(cache.open_pool), describe_pages(scratch), q, out, log_sum_exp, tiles, plan.sequences,
        cache.open_table, tiles.shape[0], cache.open_table.shape[1], softmax_scale, **constants, num_warps=4,
    )  # fmt: skip


def _grid(q: torch.Tensor, cache: PrefillCache, tiles: torch.Tensor) -> tuple[int]:
    num_kv_heads = cache.open_pool.shape[2]
    pairs = (q.shape[1] // num_kv_heads + 1) // 2
    return (pairs * tiles.shape[0] * num_kv_heads,)


def _constants(q: torch.Tensor, cache: PrefillCache, plan: PrefillPlan, log_sum_exp: torch.Tensor) -> dict[str, Any]:
    num_kv_heads, head_dim = cache.open_pool.shape[2], q.shape[2]
    return {
        "GROUP": q.shape[1] // num_kv_heads,
        "KV_HEADS": num_kv_heads,
        "D": head_dim,
        "D_PAD": max(64, triton.next_power_of_2(head_dim)),
        "SINKS": plan.policy.sink_pages,
        "RECENT": plan.policy.recent_pages,
        "WINDOW": plan.sliding_window or 0,
        "NORMALISE": q.dtype == torch.bfloat16,
        "HAS_LSE": log_sum_exp.shape[0] > 0,
    }
