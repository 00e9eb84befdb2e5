"""Three sources of weights: a loaded model, safetensors files that are streamed, and random numbers.

DecoderWeights.read(config, SafetensorsWeights(folder), torch.bfloat16, device)
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from nibble.dummy_source import dummy_seed
from nibble.errors import NibbleError
from nibble.models import read_config, weight_type
from nibble.recipes import FP8
from nibble.runtime.decoder_weights import DecoderWeights
from nibble.runtime.shards import WHOLE, Shards

log = logging.getLogger("nibble")


class ModelWeights:
    """The parameters of a loaded model."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors = dict(model.named_parameters())

    def read(self, name: str, target: torch.Tensor) -> None:
        """See `WeightSource.read`."""
        _fill(target, self._tensors.get(name), name, "the model")


class SafetensorsWeights:
    """A checkpoint's files, mapped into memory; a tensor is read when it is asked for, and goes to its place alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise NibbleError(f"{path}: can't be read ({error}); fetch the checkpoint again") from error
            self._file_of |= dict.fromkeys(file.keys(), file)

    def read(self, name: str, target: torch.Tensor) -> None:
        """See `WeightSource.read`."""
        file = self._file_of.get(name)
        _fill(target, None if file is None else file.get_tensor(name), name, str(self._folder))


class DummyWeights:
    """Random weights of realistic scale, made on the device: for speed and size, not for answers.

    A tensor depends on its name and the seed alone. Norms are 1, biases 0; projections back into the residual stream
    are smaller by the square root of twice the layers, as in training.
    """

    def __init__(self, config: PretrainedConfig, seed: int = 0) -> None:
        self._spread = float(config.initializer_range)
        self._residual = self._spread / (2 * config.num_hidden_layers) ** 0.5
        self._seed = seed

    def read(self, name: str, target: torch.Tensor) -> None:
        """See `WeightSource.read`."""
        if target.dim() == 1:
            target.fill_(0.0 if name.endswith(".bias") else 1.0)
            return
        generator = torch.Generator(target.device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        target.normal_(0.0, self._residual if is_residual else self._spread, generator=generator)


def load_decoder_weights(
    folder: Path, dtype: str, device: torch.device, shards: Shards = WHOLE, rotated: Collection[int] = ()
) -> DecoderWeights:
    """The weights of a model's folder. dtype: torch's name of a type, "auto" for the checkpoint's own, or "fp8".

    rotated: see `DecoderWeights`.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    seed = dummy_seed(read_config(folder))
    source = SafetensorsWeights(folder) if seed is None else DummyWeights(config, seed)
    own_type = weight_type(config, dtype)
    weights = DecoderWeights.read(config, source, own_type, device, shards, fp8=dtype == FP8, rotated=rotated)
    log.info("weights: %s, %.0f MiB a step reads", dtype, weights.num_bytes / 2**20)
    if not (folder / "generation_config.json").is_file():
        return weights
    return replace(weights, generation_config=GenerationConfig.from_pretrained(folder, local_files_only=True))


def _fill(target: torch.Tensor, tensor: torch.Tensor | None, name: str, origin: str) -> None:
    if tensor is None or tensor.shape != target.shape:
        got = "nothing" if tensor is None else tuple(tensor.shape)
        raise NibbleError(
            f"{origin}: weight {name}: got {got}, allowed {tuple(target.shape)}; the checkpoint does not fit its "
            "config.json"
        )
    target.copy_(tensor.detach())
