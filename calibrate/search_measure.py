"""What each format costs in each layer: KL of the model's output when that layer alone is quantized.

One pass with an fp16 cache keeps what entered every layer; a measurement then starts at the first layer that differs.
The output is compared at every `ROW_STRIDE`th position, whole vocabulary, in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from nibble.errors import NibbleError
from nibble.fake_cache import FAKE_CACHE, sealed_view
from nibble.formats import FORMATS, PAGE_TOKENS, KVFormat
from nibble.key_transform import KeyTransform
from nibble.models import ModelShape
from nibble.reference import LayerScales
from nibble.runtime.cache import CacheSpec
from nibble.visibility import PagePolicy

ROW_STRIDE = 4
ROWS_AT_ONCE = 64  # positions whose vocabulary is held in float64
FP16 = FORMATS["fp16"]

Scales = dict[str, list[LayerScales]]  # by format name, for the static ones
Transforms = dict[str, dict[int, KeyTransform]]  # by format name, then layer
Remedies = dict[str, dict[int, KVFormat]]  # likewise: what the pre-flight gives a layer instead


@dataclass(frozen=True)
class TensorErrors:
    """|x - x'| / |x| of what lies behind the first page (Frobenius norms)."""

    k: float
    v: float


@dataclass(frozen=True)
class Trace:
    """A window read with an fp16 cache: what entered each layer, and the log-probabilities at the compared rows."""

    inputs: list[torch.Tensor]
    options: list[dict[str, Any]]
    log_p: torch.Tensor


class SearchModel:
    """A model over fake caches. Changes its attention."""

    def __init__(
        self,
        model: PreTrainedModel,
        scales: Scales,
        transforms: Transforms,
        shape: ModelShape,
        remedies: Remedies | None = None,
    ) -> None:
        model.set_attn_implementation(FAKE_CACHE)
        self.model, self.scales, self.transforms, self.shape = model, scales, transforms, shape
        self.remedies = remedies or {}
        self.layers: list[nn.Module] = list(model.base_model.layers)

    def spec(self, formats: list[KVFormat], policy: PagePolicy) -> CacheSpec:
        """The cache in which each layer has its format, with the static scales and the K transform that go with it."""
        found = {i: self._transform(fmt, i) for i, fmt in enumerate(formats)}
        transforms = {i: transform for i, transform in found.items() if transform is not None}
        formats = [self.remedies.get(fmt.name, {}).get(i, fmt) for i, fmt in enumerate(formats)]
        scales = {i: self.scales[fmt.name][i] for i, fmt in enumerate(formats) if fmt.needs_calibration}
        return CacheSpec(tuple(formats), self.shape.num_kv_heads, self.shape.head_dim, policy, scales, transforms)

    def _transform(self, fmt: KVFormat, layer: int) -> KeyTransform | None:
        return self.transforms.get(fmt.name, {}).get(layer)

    @torch.inference_mode()
    def trace(self, token_ids: list[int]) -> Trace:
        """Read a window with an fp16 cache. Raises NibbleError when the model's output is not finite."""
        inputs: list[torch.Tensor] = []
        options: list[dict[str, Any]] = []

        def keep(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            inputs.append(arguments[0] if arguments else keywords["hidden_states"])
            options.append({name: value for name, value in keywords.items() if name != "hidden_states"})

        hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in self.layers]
        try:
            ids = torch.tensor([token_ids], device=self.model.device)
            spec = self.spec([FP16] * len(self.layers), PagePolicy())
            hidden = self.model.base_model(input_ids=ids, use_cache=False, fake_cache=spec).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        log_p = self._log_probabilities(hidden)
        if not torch.isfinite(log_p).all():
            raise NibbleError("format search: the model's logits are not finite even with an fp16 cache; check weights")
        return Trace(inputs, options, log_p)

    @torch.inference_mode()
    def kl(self, trace: Trace, formats: list[KVFormat], policy: PagePolicy) -> float:
        """Mean KL to the fp16 cache, in nats a token, with each layer in its format."""
        first = next((i for i, fmt in enumerate(formats) if not fmt.is_fp16), None)
        if first is None:
            return 0.0
        spec, hidden = self.spec(formats, policy), trace.inputs[first]
        for layer, options in zip(self.layers[first:], trace.options[first:], strict=True):
            out = layer(hidden, **{**options, "fake_cache": spec})
            hidden = out if isinstance(out, torch.Tensor) else out[0]
        log_q = self._log_probabilities(self.model.base_model.norm(hidden))
        total = 0.0
        for rows in range(0, len(log_q), ROWS_AT_ONCE):
            p = trace.log_p[rows : rows + ROWS_AT_ONCE].double()
            total += float((p.exp() * (p - log_q[rows : rows + ROWS_AT_ONCE].double())).sum(-1).clamp_min(0).sum())
        return total / len(log_q)

    @torch.inference_mode()
    def errors(self, trace: Trace, candidates: list[KVFormat]) -> list[dict[str, TensorErrors]]:
        """The error of K and V of each layer in each candidate format."""
        seen: dict[int, dict[str, TensorErrors]] = {}

        def observe(layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
            seen[layer] = {
                fmt.name: _errors(k, v, self.spec([fmt] * len(self.layers), PagePolicy()), layer) for fmt in candidates
            }

        for hidden, layer, options in zip(trace.inputs, self.layers, trace.options, strict=True):
            layer(hidden, **{**options, "observe": observe})
        return [seen[layer] for layer in sorted(seen)]

    def _log_probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocabulary] of the compared rows."""
        rows = hidden[0, ROW_STRIDE - 1 :: ROW_STRIDE]
        head = self.model.get_output_embeddings()
        return head(rows).float().log_softmax(-1)


def _errors(k: torch.Tensor, v: torch.Tensor, spec: CacheSpec, layer: int) -> TensorErrors:
    k_back, v_back = sealed_view(k, v, spec.formats[layer], spec.scales.get(layer), spec.key_transforms.get(layer))
    return TensorErrors(_relative(k, k_back), _relative(v, v_back))


def _relative(values: torch.Tensor, back: torch.Tensor) -> float:
    exact = values[:, PAGE_TOKENS:].half().float()  # as an open page holds it
    return float((exact - back[:, PAGE_TOKENS:]).norm() / exact.norm().clamp_min(1e-30))
