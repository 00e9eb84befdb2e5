"""The wiring that training of the needle model starts from: two attention heads that retrieve already.

Retrieval needs two heads that are of no use alone; to learn both from nothing is a matter of luck: a plateau, then a
sudden fall of the loss. So training starts behind the fall. The residual stream has named places:

    0..63     the token's own code, random, from the embedding
    64..127   the code of the token before                          written by layer 0
    128..191  the code of the value that was found                  written by layer 1
    192       one

    layer 0, head 0: at t attend to t - 1 (a constant key, a constant query turned by one position), copy its code
    layer 1, head 0: attend to where the token before is this one (codes in the channels that RoPE hardly turns),
                     copy its code; the output layer reads values from there

All other heads and the MLPs start with outputs near zero: they add what training finds for them, and no noise.
"""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from eval.needle_words import Language

CODE = 64  # channels of a code, and of a head
OWN, BEFORE, FOUND, ONE = 0, CODE, 2 * CODE, 3 * CODE
NEIGHBOUR_GAP = 30.0  # nats by which the token before beats its neighbours, about
MATCH = 48.0  # nats of a perfect match
CERTAIN = 30.0  # nats of a value that was found
QUIET = 0.01  # of its usual size: what starts random
STILL = 0.5  # radians that a channel may turn over the longest text and still be called still


@torch.no_grad()
def wire(model: LlamaForCausalLM, language: Language) -> None:
    """Put the two heads into a fresh model of hidden size 256 or more, in place."""
    config = model.config
    hidden = config.hidden_size
    frequencies = model.model.rotary_emb.inv_freq.double()
    codes = torch.randn(language.size, CODE, dtype=torch.float64)
    values = slice(language.first_value, language.first_value + language.values)
    if language.values <= CODE:  # orthogonal: a small share of attention is still read
        codes[values] = torch.linalg.qr(codes[values].T).Q.T
    codes *= CODE**0.5 / codes.norm(dim=1, keepdim=True)
    embedding = torch.zeros(language.size, hidden, dtype=torch.float64)
    embedding[:, OWN : OWN + CODE] = codes
    embedding[:, ONE] = 1.0
    model.model.embed_tokens.weight.copy_(embedding)
    layers = model.model.layers
    for layer in layers:
        layer.self_attn.o_proj.weight.mul_(QUIET)
        layer.mlp.down_proj.weight.mul_(QUIET)
    _wire_neighbour(layers[0].self_attn, frequencies, hidden)
    still = int((frequencies * config.max_position_embeddings > STILL).sum())
    _wire_match(layers[1].self_attn, still, hidden)
    head = torch.zeros(language.size, hidden, dtype=torch.float64)
    head[values, FOUND : FOUND + CODE] = codes[values] * CERTAIN / (CODE * _stream_scale(hidden, 3))
    model.lm_head.weight.mul_(0.1).add_(head)


def _stream_scale(hidden: int, codes: int) -> float:
    """What RMSNorm multiplies by while the stream holds that many codes."""
    return (hidden / (CODE * codes + 1)) ** 0.5


def _wire_neighbour(attention: torch.nn.Module, frequencies: torch.Tensor, hidden: int) -> None:
    """Layer 0, head 0. The gap to the nearest rival is size^2 / 8 times the sum of 1 - cos(frequency)."""
    scale = _stream_scale(hidden, 1)
    size = (NEIGHBOUR_GAP * CODE**0.5 / float((1 - frequencies.cos()).sum())) ** 0.5
    key = torch.cat((torch.full_like(frequencies, size), torch.zeros_like(frequencies)))
    query = torch.cat((size * frequencies.cos(), -size * frequencies.sin()))  # the key, turned back by one position
    for name, vector in (("q_proj", query), ("k_proj", key)):
        weight = getattr(attention, name).weight
        weight[:CODE] = 0.0
        weight[:CODE, ONE] = vector / scale
    _copy_code(attention, OWN, BEFORE, scale)


def _wire_match(attention: torch.nn.Module, first_still: int, hidden: int) -> None:
    """Layer 1, head 0: the first channels of both codes, in the rotary pairs that hardly turn."""
    scale = _stream_scale(hidden, 2)
    half = CODE // 2
    channels = [*range(first_still, half), *range(half + first_still, CODE)]
    size = (MATCH * CODE**0.5 / len(channels)) ** 0.5
    for name, place in (("q_proj", OWN), ("k_proj", BEFORE)):
        weight = getattr(attention, name).weight
        weight[:CODE] = 0.0
        for number, channel in enumerate(channels):
            weight[channel, place + number] = size / scale
    _copy_code(attention, OWN, FOUND, scale)


def _copy_code(attention: torch.nn.Module, source: int, target: int, scale: float) -> None:
    """KV head 0 carries a code as it is; query head 0 writes it."""
    v_proj, o_proj = attention.v_proj.weight, attention.o_proj.weight  # type: ignore[union-attr]
    v_proj[:CODE] = 0.0  # type: ignore[index]
    v_proj[:CODE, source : source + CODE] = torch.eye(CODE) / scale  # type: ignore[index]
    o_proj[target : target + CODE, :CODE] = torch.eye(CODE)  # type: ignore[index]
