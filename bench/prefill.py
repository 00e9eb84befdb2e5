"""Prefill attention against the fp16 flash attention of torch: the same queries, the whole prompt or one chunk.

    python -m bench.prefill --out bench/results/prefill.json

Each record has our time (dequantize pass and tile kernel), the time of the fastest fp16 backend of
scaled_dot_product_attention on this card (flash and cuDNN, K and V shared by a group or repeated for each head), and
their ratio. They are timed in turns, so that the card's clock is the same for all, and launches are not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.measured_commit import measured_commit
from nibble.formats import PAGE_TOKENS, KVFormat
from nibble.kernels.layout import seal_pages_for_cuda
from nibble.kernels.prefill import PrefillCache, prefill_attention, static_parameters
from nibble.kernels.prefill_dequantize import fill_scratch
from nibble.kernels.prefill_plan import PrefillPlan, plan_prefill
from nibble.quantizer import ScaleZero
from nibble.reference import LayerScales
from nibble.visibility import PagePolicy

WARM_UPS = 3
REPEATS = 9
HEAD_START_CYCLES = 2_000_000  # the card waits, so that the time is that of the kernels and not of launching them
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True)
class Case:
    """One shape. chunk: new tokens, the last of `tokens`; None for the whole prompt."""

    kv: str = "int4"
    tokens: int = 32768
    chunk: int | None = None
    q_heads: int = 64
    kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def queries(self) -> int:
        return self.chunk or self.tokens

    @property
    def flops(self) -> int:
        """Multiplications and additions of Q K and P V under the causal mask."""
        before = self.tokens - self.queries
        pairs = self.queries * before + self.queries * (self.queries + 1) // 2
        return 4 * self.head_dim * self.q_heads * pairs


CASES = [
    Case(),
    Case(dtype=torch.float16),
    Case(kv="int4-static"),
    Case(kv="k8v4"),
    Case(kv="int8"),
    Case(kv="fp16"),
    Case(tokens=8192),
    Case(tokens=2048),
    Case(chunk=2048),
    Case(chunk=256),
    Case(head_dim=64, q_heads=32),
    Case(head_dim=256, q_heads=16, tokens=16384),
    Case(head_dim=96, q_heads=32, kv_heads=32, tokens=16384),
]


def make_inputs(case: Case, device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random q [queries, q_heads, D], k and v fp16 [tokens, kv_heads, D]."""
    q = torch.randn(case.queries, case.q_heads, case.head_dim, device=device, dtype=case.dtype)
    k, v = torch.randn(2, case.tokens, case.kv_heads, case.head_dim, device=device, dtype=torch.float16)
    return q, k, v


def make_cache(case: Case, k: torch.Tensor, v: torch.Tensor) -> tuple[PrefillCache, PrefillPlan]:
    """Every full page in both pools, at scattered places, and the plan."""
    fmt = KVFormat.named(case.kv)
    pages = [x.unflatten(0, (-1, PAGE_TOKENS)).transpose(1, 2) for x in (k, v)]  # [pages, kv_heads, 64, D]
    flat = torch.full((case.kv_heads, 1, case.head_dim), 1.0, device=k.device)
    scales = (
        LayerScales(*(ScaleZero(flat * 10 / x.levels, flat * -5) for x in (fmt.k, fmt.v)))
        if fmt.needs_calibration
        else LayerScales()
    )
    places = torch.randperm(len(pages[0]), device=k.device)
    open_pool = torch.stack(pages, 1)[places].contiguous()
    sealed_pool = seal_pages_for_cuda(pages[0], pages[1], fmt, scales.k, scales.v)[places].contiguous()
    table = places.argsort().int()[None].contiguous()
    plan = plan_prefill([case.queries], [case.tokens], PagePolicy())
    return PrefillCache(fmt, open_pool, sealed_pool, table, table.clone(), scales), plan


def baselines(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The fp16 attentions of torch that can do this shape."""
    heads_first = [x.transpose(0, 1)[None].contiguous().to(case.dtype) for x in (q, k, v)]
    group = case.q_heads // case.kv_heads
    repeated = [heads_first[0], *(x.repeat_interleave(group, 1) for x in heads_first[1:])]
    chosen: dict[str, Callable[[], object]] = {}
    for name, backend in BACKENDS.items():
        for label, tensors in (("shared", heads_first), ("repeated", repeated)):
            call = _sdpa(backend, tensors, group > 1 and label == "shared", case)
            try:
                call()
            except RuntimeError:
                continue
            chosen[f"{name}, {label} KV"] = call
    return chosen


def _sdpa(backend: SDPBackend, tensors: list[torch.Tensor], shared: bool, case: Case) -> Callable[[], object]:
    q, k, v = tensors
    # torch's causal flag aligns the first query with the first key, so a chunk sees all keys, a few too many.
    causal = case.chunk is None

    def call() -> object:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shared)

    return call


def time_in_turns(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median milliseconds of each, timed one after another in every round."""
    for call in calls.values():
        for _ in range(WARM_UPS):
            call()
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS):
        for name, call in calls.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(HEAD_START_CYCLES)
            start.record()
            call()
            stop.record()
            stop.synchronize()
            rounds[name].append(start.elapsed_time(stop))
    return {name: statistics.median(times) for name, times in rounds.items()}


def measure(case: Case) -> dict[str, object]:
    """One record."""
    q, k, v = make_inputs(case)
    cache, plan = make_cache(case, k, v)
    calls = baselines(case, q, k, v)
    calls["ours"] = lambda: prefill_attention(q, cache, plan, softmax_scale=case.head_dim**-0.5)
    calls["dequantize"] = lambda: fill_scratch(cache, plan, static_parameters(cache))
    times = time_in_turns(calls)
    ms, dequantize_ms = times.pop("ours"), times.pop("dequantize")
    best = min(times, key=lambda name: times[name]) if times else None
    return {
        "kernel": "prefill",
        "kv": case.kv,
        "tokens": case.tokens,
        "queries": case.queries,
        "q_heads": case.q_heads,
        "kv_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "dtype": str(case.dtype).removeprefix("torch."),
        "ms": round(ms, 4),
        "dequantize_ms": round(dequantize_ms, 4),
        "tflops": round(case.flops / ms / 1e9, 1),
        "ratio_to_best_fp16": round(ms / times[best], 3) if best else None,
        "baseline": best,
        "baselines_ms": {name: round(time, 4) for name, time in times.items()},
    }


def main() -> None:
    """Measure every case, print a record a line and write them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/prefill.json"))
    arguments = parser.parse_args()
    versions = {"torch": torch.__version__, "triton": version("triton"), "cudnn": torch.backends.cudnn.version()}
    stamp = {"card": torch.cuda.get_device_name(), "versions": versions, "commit": measured_commit()}
    records = []
    for case in CASES:
        records.append(measure(case) | stamp)
        print(json.dumps(records[-1]), flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(records, indent=2) + "\n")


if __name__ == "__main__":
    main()
