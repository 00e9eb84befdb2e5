"""The few weights that a pre-flight looks at, read by name from the safetensors without loading a model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from nibble.errors import NibbleError
from nibble.models import weight_files

NAME = re.compile(r"layers\.(\d+)\.self_attn\.(q_proj\.bias|k_proj\.bias|q_norm\.weight|k_norm\.weight|sinks)$")
KINDS = {"q_proj.bias": "q_bias", "k_proj.bias": "k_bias", "q_norm.weight": "q_norm", "k_norm.weight": "k_norm"}


@dataclass(frozen=True)
class LayerWeights:
    """Small tensors of one layer's attention, float32; None where the model has none. sinks: it has learned sinks."""

    q_bias: torch.Tensor | None = None
    k_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    sinks: bool = False


def read_attention_weights(source: Path, num_layers: int) -> list[LayerWeights]:
    """Of each layer. Reads headers and a few kilobytes a layer. Raises NibbleError: damaged file, NaN or Inf."""
    found: list[dict[str, torch.Tensor | bool]] = [{} for _ in range(num_layers)]
    for path in weight_files(source):
        try:
            with safe_open(path, framework="pt") as stream:
                for name in stream.keys():  # noqa: SIM118  no mapping
                    if (match := NAME.search(name)) and int(match[1]) < num_layers:
                        layer, kind = int(match[1]), match[2]
                        if kind == "sinks":
                            found[layer]["sinks"] = True
                        else:
                            found[layer][KINDS[kind]] = _finite(stream.get_tensor(name).float(), path, name, layer)
        except (OSError, SafetensorError) as error:
            raise NibbleError(f"{path}: can't be read ({error}); fetch the model again") from error
    return [LayerWeights(**layer) for layer in found]  # type: ignore[arg-type]


def _finite(tensor: torch.Tensor, path: Path, name: str, layer: int) -> torch.Tensor:
    if not torch.isfinite(tensor).all():
        raise NibbleError(
            f"pre-flight: layer {layer}: {name} in {path} holds NaN or Inf; allowed finite numbers. The weights are "
            "damaged: fetch the model again"
        )
    return tensor
