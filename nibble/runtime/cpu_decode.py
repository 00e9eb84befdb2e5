"""Attention of decoding sequences on the CPU, all at once and with dequantization folded out of it.

Codes become floats and are multiplied as they are; scales and zero points go into the query and the weights, as in the
CUDA kernel: q (s k + z) = (q s) k + q z. So a page's codes are written once and read once, whatever the format.
"""

from __future__ import annotations

import torch

from nibble.formats import PAGE_TOKENS
from nibble.packing import PageCodes, unpack_pages
from nibble.quantizer import ScaleZero
from nibble.runtime.cache import CacheStorage
from nibble.runtime.decode_batch import DecodeBatch, PageReads


def attend_decode(
    storage: CacheStorage,
    layer: int,
    q: torch.Tensor,
    batch: DecodeBatch,
    softmax_scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """Attention of one query for each sequence of the batch, in fp32.

    q: [queries, kv_heads, group, head_dim] in the basis of the stored K. Returns fp32 of the same shape.
    """
    q = q.float() * softmax_scale
    pages = _pages(storage, layer, batch)
    scores = q.new_zeros(len(batch) * batch.pages, *q.shape[1:3], PAGE_TOKENS)
    for reads, k, _ in pages:
        scores.index_copy_(0, reads.places, _multiply(q[reads.queries], _transpose(k)))
    scores = scores.unflatten(0, (len(batch), batch.pages))
    offset = storage.key_offset(layer, torch.arange(batch.pages * PAGE_TOKENS))
    if offset is not None:
        scores += torch.einsum("bhgd,pthd->bphgt", q, offset.unflatten(0, (batch.pages, PAGE_TOKENS)))
    scores.masked_fill_(batch.hidden(sliding_window), -torch.inf)
    weights = scores.sub_(scores.amax((1, 4), keepdim=True)).exp_()
    outs = q.new_zeros(len(batch) * batch.pages, *q.shape[1:])
    for reads, _, v in pages:
        outs.index_copy_(0, reads.places, _multiply(weights.flatten(0, 1)[reads.places], v))
    return outs.unflatten(0, (len(batch), batch.pages)).sum(1) / weights.sum((1, 4))[..., None]


def _pages(storage: CacheStorage, layer: int, batch: DecodeBatch) -> list[tuple[PageReads, PageCodes, PageCodes]]:
    """K and V [pages, kv_heads, 64, head_dim] of the open and of the sealed pages that the batch reads."""
    k, v = storage.open[layer].index_select(0, batch.open.ids).float().unbind(1)
    v.masked_fill_(batch.unwritten, 0.0)  # a weight of 0 does not hide the Inf or NaN of whoever had the page before
    pages = [(batch.open, PageCodes(k, None), PageCodes(v, None))]
    if len(batch.sealed):
        sealed, scales = storage.sealed[layer].index_select(0, batch.sealed.ids), storage.scales(layer)
        pages.append((batch.sealed, *unpack_pages(sealed, storage.layouts[layer], scales.k, scales.v)))
    return pages


def _multiply(x: torch.Tensor, pages: PageCodes) -> torch.Tensor:
    """x [..., m, n] times the values of pages [..., n, channels], without forming them."""
    if pages.parameters is None:
        return x @ pages.codes
    scale, zero = pages.parameters.scale.float(), pages.parameters.zero.float()
    if scale.shape[-1] == 1:  # one for each row of the pages
        return (x * scale.mT) @ pages.codes + (x * zero.mT).sum(-1, keepdim=True)
    return (x @ pages.codes) * scale + x.sum(-1, keepdim=True) * zero


def _transpose(pages: PageCodes) -> PageCodes:
    parameters = pages.parameters
    return PageCodes(pages.codes.mT, parameters and ScaleZero(parameters.scale.mT, parameters.zero.mT))
