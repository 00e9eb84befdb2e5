"""The model on one side, the cache on the other: turns a step into logits."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from nibble.errors import NibbleError
from nibble.key_transform import KeyTransform
from nibble.rotation import fold_value_rotation
from nibble.runtime.attention import ATTENTION, AttentionBackend
from nibble.runtime.cache import CacheSpec
from nibble.runtime.request import EngineLimits
from nibble.runtime.step import Step

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")  # their angles depend on the longest position of the batch


class ModelRunner:
    """Owns a model whose attention goes through the cache. Changes the model in place (attention, folded rotation)."""

    def __init__(
        self, model: PreTrainedModel, spec: CacheSpec, backend: AttentionBackend, limits: EngineLimits
    ) -> None:
        _check_model(model, spec, limits)
        for index, (fmt, layer) in enumerate(zip(spec.formats, model.model.layers, strict=True)):
            if fmt.v.rotated or spec.key_transforms.get(index, KeyTransform()).rotate_value:
                fold_value_rotation(layer.self_attn, spec.head_dim)
        model.set_attn_implementation(ATTENTION)
        self.model = model
        self.backend = backend
        transforms = {layer: transform.to(model.device) for layer, transform in spec.key_transforms.items()}
        self.key_transforms = transforms

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


def _check_model(model: PreTrainedModel, spec: CacheSpec, limits: EngineLimits) -> None:
    config = model.config
    name = type(model).__name__
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in LENGTH_DEPENDENT_ROPE:
        raise NibbleError(f"{name}: rope type {rope!r} depends on the batch; allowed: default, linear, llama3, yarn")
    if limits.max_context > config.max_position_embeddings:
        raise NibbleError(
            f"max_context: got {limits.max_context}, allowed up to {config.max_position_embeddings} for this model"
        )
    if len(spec.formats) != config.num_hidden_layers:
        raise NibbleError(f"KV formats: got {len(spec.formats)} layers, {name} has {config.num_hidden_layers}")
