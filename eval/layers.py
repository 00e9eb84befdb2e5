"""Is each layer's cache as good as its format can be? One text, replayed through both engines layer by layer.

A single broken layer of thirty may cost less than any threshold of the whole model. So each layer of the quantized
engine is given the very input that the fp16 engine's layer got, and their attention outputs are compared:

    error(layer)    = |output - output fp16| / |output fp16|            through the engine's own cache
    expected(layer) = the same for an exact quantizer (`nibble.fake_cache`) on the fp16 engine's Q, K and V
    ratio(layer)    = error / (expected + floor)                        1 for a cache that does what its format says
    clipped(layer)  = share of the text's K or V outside the range of the engine's static scales
    stored(page)    = largest |value read back - value|, in half steps of the exact quantizer     1 for rounded codes

The ratio shows a cache that is written or read wrongly, the clipped share one whose static scales are another's. The
floor is what the model's type rounds: both engines keep fp16 pages, so their rounding cancels. Attention may not care
what is wrong with K: what is the same for all keys drops out of the softmax. So sealed pages are also held against the
very K and V that they were made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from eval.records import LayerFigures
from nibble.fake_cache import fake_cache_attention
from nibble.formats import FORMATS, PAGE_TOKENS, ScaleKind, TensorFormat
from nibble.packing import unseal_pages
from nibble.quantizer import ScaleZero, quantize
from nibble.reference import LayerScales
from nibble.rotation import rotate
from nibble.runtime import Engine
from nibble.runtime.cache import CacheSpec
from nibble.runtime.cpu_backend import CpuBackend
from nibble.runtime.step import Step

SMALLEST_ERROR = 1e-4  # relative: below it, order of summation is part of the figure
Edit = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass
class LayerRecord:
    """What passed through one layer, all tokens so far. q, k, v: [tokens, heads, D]; output: [tokens, hidden].

    sealed: the bytes of the pages that were sealed, in sequence order, uint8 [pages, kv_heads, page_bytes].
    """

    inputs: list[torch.Tensor] = field(default_factory=list)
    output: list[torch.Tensor] = field(default_factory=list)
    q: list[torch.Tensor] = field(default_factory=list)
    k: list[torch.Tensor] = field(default_factory=list)
    v: list[torch.Tensor] = field(default_factory=list)
    sealed: list[torch.Tensor] = field(default_factory=list)
    scaling: float = 1.0
    sliding_window: int | None = None


@torch.inference_mode()
def measure_layers(fp16: Engine, quantized: Engine, token_ids: list[int]) -> list[LayerFigures]:
    """The figures of every layer over one text; the first pages, where every query sees fp16 alone, do not count."""
    references, candidates = replay(fp16, quantized, token_ids)
    first = (quantized.spec.policy.sink_pages + quantized.spec.policy.recent_pages + 1) * PAGE_TOKENS
    layers = decoder_layers(fp16)
    return [
        _figures(index, layers[index].self_attn, references[index], candidates[index], quantized.spec, first)
        for index in range(len(layers))
    ]


def can_be_replayed(engine: Engine) -> bool:
    """True when the engine runs transformers' layers (the CPU runner), whose inputs and outputs can be reached."""
    return hasattr(engine.runner, "backend") and hasattr(engine.runner, "model")


def decoder_layers(engine: Engine) -> list[Any]:
    """The model's layers, in order."""
    runner: Any = engine.runner
    return list(runner.model.model.layers)


def replay(fp16: Engine, quantized: Engine, token_ids: list[int]) -> tuple[list[LayerRecord], list[LayerRecord]]:
    """Read a text with both engines, chunk by chunk; every layer of the second gets the input that the first's got."""
    count = len(fp16.spec.formats)
    references, candidates = [LayerRecord() for _ in range(count)], [LayerRecord() for _ in range(count)]

    def keep(layer: int, hidden: torch.Tensor) -> torch.Tensor:
        references[layer].inputs = [hidden]
        return hidden

    def put_in(layer: int, hidden: torch.Tensor) -> torch.Tensor:
        return references[layer].inputs[0]

    with (
        _recording_backend(fp16, references),
        _recording_backend(quantized, candidates),
        _hooked(fp16, references, keep),
        _hooked(quantized, candidates, put_in),
    ):
        for _ in zip(fp16.logits(token_ids), quantized.logits(token_ids), strict=True):
            pass
    return references, candidates


def _figures(
    index: int, attention: nn.Module, reference: LayerRecord, candidate: LayerRecord, spec: CacheSpec, first: int
) -> LayerFigures:
    wanted, got = torch.cat(reference.output), torch.cat(candidate.output)
    floor = max(SMALLEST_ERROR, torch.finfo(wanted.dtype).eps)
    size = wanted[first:].float()
    error = (got - wanted)[first:].float()
    explained = _explained_error(index, attention, reference, spec)[first:]
    pages = zip(*(part.split(PAGE_TOKENS) for part in (error, explained, size)), strict=True)
    return LayerFigures(
        layer=index,
        format=spec.formats[index].name,
        error=_relative(error, size),
        expected=_relative(explained, size),
        ratio=_relative(error, size) / (_relative(explained, size) + floor),
        first_position=first,
        page_ratios=[_relative(got, of) / (_relative(known, of) + floor) for got, known, of in pages],
        clipped=clipped_share(index, reference, spec),
        stored_errors=_stored_errors(index, candidate, spec),
    )


def _explained_error(index: int, attention: nn.Module, record: LayerRecord, spec: CacheSpec) -> torch.Tensor:
    """What an exact quantizer changes in the layer's output, float32 [tokens, hidden]."""
    q, k, v = (torch.cat(parts).transpose(0, 1)[None].float() for parts in (record.q, record.k, record.v))
    exact = CacheSpec((FORMATS["fp16"],) * len(spec.formats), spec.num_kv_heads, spec.head_dim, spec.policy)
    layer: Any = SimpleNamespace(layer_idx=index)
    options = {"scaling": record.scaling, "sliding_window": record.sliding_window}
    outs = [fake_cache_attention(layer, q, k, v, None, fake_cache=cache, **options)[0] for cache in (exact, spec)]  # type: ignore[arg-type]
    projection: Any = attention.o_proj
    projected = [projection(out[0].flatten(1).to(projection.weight.dtype)).float() for out in outs]
    return projected[1] - projected[0]


def clipped_share(index: int, record: LayerRecord, spec: CacheSpec) -> float:
    """The larger share, K's or V's, of stored values more than half a step outside the layer's static range."""
    transform, scales = spec.key_transforms.get(index), spec.scales.get(index)
    if scales is None or (scales.k is None and scales.v is None):
        return 0.0
    k, v = torch.cat(record.k).float(), torch.cat(record.v).float()
    if transform is not None:
        k, offset = transform.store(k), transform.offset(torch.arange(len(k)))
        k = k if offset is None else k - offset
    fmt = spec.formats[index]
    v = rotate(v) if fmt.v.rotated or (transform is not None and transform.rotate_value) else v
    sealed = slice(spec.policy.sink_pages * PAGE_TOKENS, None)
    return max(_clipped(k[sealed], scales.k, fmt.k), _clipped(v[sealed], scales.v, fmt.v))


def _clipped(values: torch.Tensor, static: ScaleZero | None, fmt: TensorFormat) -> float:
    if static is None:
        return 0.0
    codes = (values.transpose(0, 1) - static.zero) / static.scale
    return float(((codes < -0.5) | (codes > fmt.levels + 0.5)).float().mean())


def _stored_errors(index: int, record: LayerRecord, spec: CacheSpec) -> list[float]:
    """The largest error of every sealed page, K's or V's, in half steps of the exact quantizer."""
    if not record.sealed:
        return []
    fmt, scales, transform = spec.formats[index], spec.scales.get(index, LayerScales()), spec.key_transforms.get(index)
    k, v, sealed = torch.cat(record.k).float(), torch.cat(record.v).float(), torch.cat(record.sealed)
    offset = None if transform is None else transform.offset(torch.arange(len(k)))
    k = k if offset is None else k - offset
    first = spec.policy.sink_pages * PAGE_TOKENS
    k, v = (
        x[first : first + len(sealed) * PAGE_TOKENS].half().unflatten(0, (-1, PAGE_TOKENS)).transpose(1, 2)
        for x in (k, v)
    )
    k_back, v_back = unseal_pages(sealed, spec.layouts[index], scales.k, scales.v)
    errors = torch.maximum(_half_steps(k_back, k, fmt.k, scales.k), _half_steps(v_back, v, fmt.v, scales.v))
    return [float(error) for error in errors]


def _half_steps(back: torch.Tensor, values: torch.Tensor, fmt: TensorFormat, static: ScaleZero | None) -> torch.Tensor:
    """The largest |back - values| of every page [pages, heads, 64, D], in half steps; 0 for 16 bits.

    Values outside static scales count as the end of the range: `clipped_share` judges them.
    """
    if fmt.scale is ScaleKind.NONE:
        return torch.zeros(len(values))
    exact = quantize(values, fmt, static).parameters
    step, lowest = exact.scale.float(), exact.zero.float()
    stored = values.float().clamp(lowest, lowest + fmt.levels * step)
    return ((back - stored).abs() / (step / 2)).amax((1, 2, 3))


def _relative(error: torch.Tensor, size: torch.Tensor) -> float:
    return float(error.norm() / size.norm().clamp_min(1e-12))


class _Recorder:
    """A backend that keeps what passes through it."""

    def __init__(self, backend: CpuBackend, records: list[LayerRecord]) -> None:
        self._backend, self._records = backend, records

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor, step: Step) -> None:
        self._records[layer].k.append(k)
        self._records[layer].v.append(v)
        self._backend.append(layer, k, v, step)

    def seal(self, layer: int, step: Step) -> None:
        self._backend.seal(layer, step)
        if step.seal_pairs:
            self._records[layer].sealed.append(self._backend.storage.sealed[layer][step.seal_to])

    def attend(
        self, layer: int, q: torch.Tensor, step: Step, softmax_scale: float, sliding_window: int | None
    ) -> torch.Tensor:
        record = self._records[layer]
        record.q.append(q)
        record.scaling, record.sliding_window = softmax_scale, sliding_window
        return self._backend.attend(layer, q, step, softmax_scale, sliding_window)


@contextmanager
def _recording_backend(engine: Engine, records: list[LayerRecord]) -> Iterator[None]:
    runner: Any = engine.runner
    backend = runner.backend
    runner.backend = _Recorder(backend, records)
    try:
        yield
    finally:
        runner.backend = backend


@contextmanager
def _hooked(engine: Engine, records: list[LayerRecord], edit: Edit) -> Iterator[None]:
    """Pass every attention layer's input through `edit` and keep its output."""
    handles = []
    for index, layer in enumerate(decoder_layers(engine)):

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], index: int = index) -> Any:
            if args:
                return (edit(index, args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": edit(index, kwargs["hidden_states"])}

        def after(module: nn.Module, args: Any, output: Any, index: int = index) -> None:
            records[index].output.append(output[0][0])

        handles.append(layer.self_attn.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(layer.self_attn.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
