"""Runs steps with transformers' model on a CPU: the model on one side, the cache on the other."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig, PreTrainedModel

from nibble.errors import NibbleError
from nibble.key_transform import KeyTransform
from nibble.rotation import fold_value_rotation
from nibble.runtime.attention import ATTENTION
from nibble.runtime.cache import CacheSpec, CacheStorage, PoolSizes
from nibble.runtime.cpu_backend import CpuBackend
from nibble.runtime.request import EngineLimits
from nibble.runtime.sampler import Choices, Sampled, SampledRows, pick_as_asked, pick_likeliest, read_rows
from nibble.runtime.sequence import Sequence
from nibble.runtime.step import Span, Step

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")  # their angles depend on the longest position of the batch


@dataclass(frozen=True)
class PickedTokens:
    """Tokens that are on the host already."""

    sequences: Rows[Sequence]
    rows: SampledRows | None

    def wait(self) -> None:
        """There is nothing to wait for."""

    def read(self) -> list[Sampled]:
        return [] if self.rows is None else read_rows(self.rows, self.sequences)


class ModelRunner:
    """Owns a model whose attention goes through the cache. Changes the model in place (attention, folded rotation)."""

    overlaps = False
    device = torch.device("cpu")

    def __init__(self, model: PreTrainedModel, spec: CacheSpec, limits: EngineLimits) -> None:
        check_model(model.config, spec, limits)
        if limits.threads:
            torch.set_num_threads(limits.threads)
        self.pool_sizes = PoolSizes.for_limits(spec, limits)
        for index, (fmt, layer) in enumerate(zip(spec.formats, model.model.layers, strict=True)):
            if fmt.v.rotated or spec.key_transforms.get(index, KeyTransform()).rotate_value:
                fold_value_rotation(layer.self_attn, spec.head_dim)
        _store_for_few_rows(model)
        model.set_attn_implementation(ATTENTION)
        self.model = model
        self.vocabulary = int(model.config.vocab_size)
        self.backend = CpuBackend(CacheStorage(spec, self.pool_sizes))
        transforms = {layer: transform.to(model.device) for layer, transform in spec.key_transforms.items()}
        self.key_transforms = transforms

    @torch.inference_mode()
    def launch(self, step: Step, asked: Rows[Span]) -> PickedTokens:
        """See `Runner.launch`."""
        sequences = [span.sequence for span in asked]
        logits = self.logits(step, torch.tensor([span.start + span.length - 1 for span in asked], dtype=torch.long))
        if not sequences:
            return PickedTokens(sequences, None)
        picked, choices = pick_likeliest(logits), Choices.of(sequences, logits.device)
        return PickedTokens(sequences, picked if choices is None else pick_as_asked(logits, picked, choices))

    @torch.inference_mode()
    def logits(self, step: Step, rows: torch.Tensor) -> torch.Tensor:
        """Run the step; float32 [rows, vocabulary] of the given rows of its tokens."""
        output = self.model(
            input_ids=step.token_ids,
            position_ids=step.positions,
            use_cache=False,
            logits_to_keep=rows,
            step=step,
            backend=self.backend,
            key_transforms=self.key_transforms,
        )
        return output.logits[0].float()

    def close(self) -> None:
        """See `Runner.close`; there is nothing to let go of."""


def _store_for_few_rows(model: PreTrainedModel) -> None:
    """Store weights [out, in] with `out` running fastest: a product with the few rows of a decode step is faster."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = module.weight.data.t().contiguous().t()


def check_model(config: PretrainedConfig, spec: CacheSpec, limits: EngineLimits) -> None:
    """NibbleError unless the model can be run with this cache and context."""
    name = f"{config.model_type} model"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in LENGTH_DEPENDENT_ROPE:
        raise NibbleError(f"{name}: rope type {rope!r} depends on the batch; allowed: default, linear, llama3, yarn")
    if limits.max_context > config.max_position_embeddings:
        raise NibbleError(
            f"max_context: got {limits.max_context}, allowed up to {config.max_position_embeddings} for this model"
        )
    if len(spec.formats) != config.num_hidden_layers:
        raise NibbleError(f"KV formats: got {len(spec.formats)} layers, {name} has {config.num_hidden_layers}")
