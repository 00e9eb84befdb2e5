"""A few small launches of every kernel, to be run under compute-sanitizer (it comes with the CUDA toolkit).

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck  python -m tests.gpu.sanitize
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck python -m tests.gpu.sanitize

Without caching every tensor is an allocation of its own, so that a step past its end is seen. The launches are checked
against nothing here; the tests do that.
"""

from __future__ import annotations

import torch

from nibble.formats import FORMATS
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


def main() -> None:
    for case in DECODE_CASES:
        run_decode(case)
        print(case.fmt.name, case.head_dim, case.group, flush=True)
    for kv in ("int4", "int8", "fp16"):
        run_prefill(Shape(kv=kv, query_lens=(1, 65, 130), seq_lens=(1, 449, 700)))
        print("prefill", kv, flush=True)


if __name__ == "__main__":
    main()
