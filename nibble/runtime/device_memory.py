"""How much of a GPU's memory the page pools may take: what is free, less what a step needs while it runs."""

from __future__ import annotations

import torch

from nibble.runtime.decoder_weights import DecoderWeights
from nibble.runtime.request import EngineLimits

RESERVE_BYTES = 1 << 30  # graphs, libraries' workspaces, fragmentation
ALIVE_HIDDEN_STATES = 4  # of a chunk, in a layer: the stream, its norm, what attention and the MLP give


def free_for_pages(weights: DecoderWeights, limits: EngineLimits) -> int | None:
    """Bytes for the page pools; None on a CPU, where memory is not ours to measure."""
    device = weights.norm.device
    if device.type == "cpu":
        return None
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return free - step_bytes(weights, limits) - RESERVE_BYTES


def step_bytes(weights: DecoderWeights, limits: EngineLimits) -> int:
    """What the largest step holds at once: a chunk's activations, far pages in fp16, logits."""
    shape, itemsize = weights.shape, weights.embedding.element_size()
    widths = ALIVE_HIDDEN_STATES * shape.hidden + 2 * sum(shape.qkv_rows) + 3 * shape.intermediate
    activations = limits.step_tokens * widths * itemsize
    scratch = 3 * limits.max_context * shape.kv_heads * shape.head_dim * 2 * 2
    logits = 4 * limits.max_running * shape.vocabulary * 4
    return activations + scratch + logits
