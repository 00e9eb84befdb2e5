r"""A few small launches of every kernel, to be run under compute-sanitizer (it comes with the CUDA toolkit).

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --report-api-errors no \
        python -m tests.gpu.sanitize
    compute-sanitizer --tool racecheck --num-cuda-barriers 80 --kernel-name kns=decode_attention \
        --kernel-name kns=combine_splits --kernel-name kns=seal_pages --kernel-name kns=append_tokens \
        python -m tests.gpu.sanitize --every-lane-arrives

Without caching every tensor is an allocation of its own, so that a step past its end is seen. racecheck takes the
arrival of one lane to speak for that lane alone; with --every-lane-arrives the decode kernel is compiled so that it can
follow (cuda/ptx.cuh). The launches are checked against nothing here; the tests do that.
"""

from __future__ import annotations

import argparse

import torch

from nibble.formats import FORMATS
from nibble.kernels import compiler
from nibble.kernels.decode import DecodeWorkspace
from nibble.kernels.prefill import prefill_attention
from nibble.kernels.seal import append_tokens, seal_pages_on_gpu
from tests.gpu.cases import DecodeCase, make_batch
from tests.gpu.prefill_scene import Shape, build_cache, make_tokens

LENGTHS = (0, 1, 65, 700, 1500)
DECODE_CASES = (
    *(DecodeCase(fmt, LENGTHS) for fmt in FORMATS.values()),
    DecodeCase(FORMATS["int4"], LENGTHS, head_dim=80, group=3),
    DecodeCase(FORMATS["int4"], LENGTHS, head_dim=256, group=16),
    DecodeCase(FORMATS["int4"], LENGTHS, sliding_window=100, dtype=torch.bfloat16),
)
SPLIT_PAGES = (4, 64)


def run_decode(case: DecodeCase) -> None:
    """Decode with and without splits, then append a token and seal every full page."""
    batch = make_batch(case)
    heads = case.kv_heads * case.group
    for split_pages in SPLIT_PAGES:
        workspace = DecodeWorkspace.allocate(
            len(case.lengths), heads, case.kv_heads, case.head_dim, batch.block_table.shape[1], "cuda",
            split_pages=split_pages,
        )  # fmt: skip
        batch.decode(workspace)
    places = batch.block_table[-1, : case.lengths[-1] // 64].contiguous()
    kv = torch.randn(2, len(places), case.kv_heads, case.head_dim, device="cuda").half()
    append_tokens(kv[0], kv[1], batch.open_pool, places * 64)
    seal_pages_on_gpu(batch.open_pool, batch.sealed_pool, places, places, fmt=case.fmt, scales=batch.scales)
    torch.cuda.synchronize()


def run_prefill(shape: Shape) -> None:
    """One ragged step of prefill."""
    tokens = make_tokens(shape)
    cache, plan = build_cache(shape, tokens, "cuda")
    prefill_attention(torch.cat(tokens.q).cuda(), cache, plan, softmax_scale=shape.softmax_scale)
    torch.cuda.synchronize()


def let_every_lane_arrive() -> None:
    """Compile the kernels for racecheck from here on."""
    flags_of = compiler._define_flags
    compiler._define_flags = lambda source: (*flags_of(source), "-DEVERY_LANE_ARRIVES")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every-lane-arrives", action="store_true", help="compile the kernels for racecheck")
    if parser.parse_args().every_lane_arrives:
        let_every_lane_arrive()
    for case in DECODE_CASES:
        run_decode(case)
        print(case.fmt.name, case.head_dim, case.group, flush=True)
    for kv in ("int4", "int8", "fp16"):
        run_prefill(Shape(kv=kv, query_lens=(1, 65, 130), seq_lens=(1, 449, 700)))
        print("prefill", kv, flush=True)


if __name__ == "__main__":
    main()
