"""Engines of full size without a download: shapes from recipes/models/configs, random weights, a cache that is filled
without computing it.

A decode step costs the same whatever the tokens say, so a long context need not be computed to time it: `prime` lets
the scheduler and the page tables do all their work for a prompt and leaves out the forward pass. The pools hold random
pages that were truly quantized.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from nibble.balance import BasisChange
from nibble.dummy_source import CONFIGS
from nibble.formats import FORMATS, PAGE_TOKENS
from nibble.kernels.layout import seal_pages_for_cuda
from nibble.key_transform import KeyTransform
from nibble.runtime import Engine, EngineLimits, SamplingParams
from nibble.runtime.cache import CacheSpec, PoolSizes
from nibble.runtime.decoder_shape import DecoderShape
from nibble.runtime.decoder_weights import DecoderWeights
from nibble.runtime.sampler import Sampled
from nibble.runtime.sequence import Sequence
from nibble.runtime.shards import WHOLE, Shards
from nibble.runtime.step import Span, Step
from nibble.runtime.weight_sources import DummyWeights
from nibble.visibility import PagePolicy

SAMPLE_PAGES = 64  # truly quantized pages, repeated all over the pool


class NumberTokenizer:
    """Stands in where no tokenizer can be had: text is not what is measured."""

    chat_template = None
    eos_token_id = None

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "." * len(token_ids)


def read_model_config(model: str) -> PretrainedConfig:
    """The shipped config of a model recipe."""
    return AutoConfig.from_pretrained(CONFIGS / f"{model}.json")


def dummy_weights(model: str, kind: str = "bf16", shards: Shards = WHOLE) -> DecoderWeights:
    """Random weights of a model's shape, or a rank's part of them, on its GPU. kind: bf16, or fp8 for projections in
    e4m3."""
    config = read_model_config(model)
    device, layers = torch.device("cuda", shards.rank), range(config.num_hidden_layers)
    return DecoderWeights.read(
        config, DummyWeights(config), torch.bfloat16, device, shards, fp8=kind == "fp8", rotated=layers
    )


def make_spec(weights: DecoderWeights, kv: str) -> CacheSpec:
    """The cache of a shipped format; 4-bit K is stored in a basis, as in a built engine."""
    shape, layers = DecoderShape.of(weights.config), len(weights.layers)
    transforms = {}
    if FORMATS[kv].k.bits == 4:
        random = torch.randn(shape.kv_heads, shape.head_dim, shape.head_dim, generator=torch.Generator().manual_seed(0))
        forward = torch.linalg.qr(random)[0].contiguous()
        transforms = dict.fromkeys(range(layers), KeyTransform(BasisChange(forward, forward)))
    formats = (FORMATS[kv],) * layers
    return CacheSpec(formats, shape.kv_heads, shape.head_dim, PagePolicy(), key_transforms=transforms)


def make_engine(weights: DecoderWeights, kv: str, limits: EngineLimits) -> Engine:
    """An engine whose pools hold random pages."""
    engine = Engine(weights, NumberTokenizer(), make_spec(weights, kv), limits)
    fill_pools(engine)
    return engine


def fill_pools(engine: Engine) -> None:
    """Random values in every page of every layer."""
    storage = engine.runner.backend.storage  # type: ignore[attr-defined]
    shape = (SAMPLE_PAGES, storage.spec.num_kv_heads, PAGE_TOKENS, storage.spec.head_dim)
    k, v = (torch.randn(shape, device=storage.open[0].device).half() for _ in range(2))
    few = {fmt: seal_pages_for_cuda(k, v, fmt) for fmt in set(storage.spec.formats)}
    for opened, sealed, fmt in zip(storage.open, storage.sealed, storage.spec.formats, strict=True):
        opened.normal_()
        for start in range(0, len(sealed), SAMPLE_PAGES):
            part = sealed[start : start + SAMPLE_PAGES]
            part.copy_(few[fmt][: len(part)])


@dataclass(frozen=True)
class _Given:
    sequences: list[Sequence]

    def wait(self) -> None: ...

    def read(self) -> list[Sampled]:
        return [Sampled(1, 0.0, {}) for _ in self.sequences]


class _NoForward:
    """A runner that computes nothing."""

    overlaps = False
    device = torch.device("cpu")

    def __init__(self, vocabulary: int, pool_sizes: PoolSizes) -> None:
        self.vocabulary, self.pool_sizes = vocabulary, pool_sizes

    def launch(self, step: Step, asked: Rows[Span]) -> _Given:
        return _Given([span.sequence for span in asked])

    def logits(self, step: Step, rows: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("a runner that computes nothing has no logits")


def prime(engine: Engine, contexts: list[int], params: SamplingParams) -> int:
    """Bring sequences of these lengths to where they decode; how many the pools let run at once."""
    runner = engine.runner
    engine.runner = _NoForward(runner.vocabulary, runner.pool_sizes)
    generator = torch.Generator().manual_seed(0)
    for context in contexts:
        engine.submit(torch.randint(0, runner.vocabulary, (context - 1,), generator=generator).tolist(), params)
    sequences = engine.scheduler
    while any(s.num_pending > 1 for s in sequences.running) or (sequences.waiting and _admits_more(engine)):
        engine.step()
    engine.runner = runner
    return len(sequences.running)


def _admits_more(engine: Engine) -> bool:
    before = len(engine.scheduler.running)
    engine.step()
    return len(engine.scheduler.running) > before


def cancel_all(engine: Engine) -> None:
    """End every request and forget what the pools know."""
    for sequence in [*engine.scheduler.running, *engine.scheduler.waiting]:
        engine.cancel(sequence.request_id)
    while engine.has_work:
        engine.step()


def cache_bytes_read(spec: CacheSpec, contexts: list[int]) -> int:
    """Bytes of the cache that one decode step reads, all layers."""
    per_sealed = spec.sealed_page_bytes
    per_open_token = spec.open_page_bytes // PAGE_TOKENS
    total = 0
    for context in contexts:
        sealed = spec.policy.first_recent_page(context - 1) - spec.policy.sink_pages
        total += sealed * per_sealed + (context - sealed * PAGE_TOKENS) * per_open_token
    return total
