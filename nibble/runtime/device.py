"""Which device an engine runs on, and why. It is said in the log: a silent fall to the CPU would cost much.

| environment variable | meaning | default |
|---|---|---|
| DEVICE | `cpu` or `cuda`, for engines whose limits leave it open | a GPU that the kernels know, else the CPU |
"""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec

import torch
from transformers import PretrainedConfig

from nibble.architecture import read_architecture
from nibble.errors import NibbleError
from nibble.kernels.compiler import architecture_of
from nibble.kernels.instances import DecodeInstance
from nibble.runtime.cache import CacheSpec
from nibble.runtime.decoder_shape import DecoderShape
from nibble.runtime.request import DEVICES

log = logging.getLogger("nibble")


def wants_gpu(asked: str) -> bool:
    """Is there a GPU, and may it be used?"""
    return _resolve(asked) != "cpu" and torch.cuda.is_available()


def choose_device(asked: str, config: PretrainedConfig, spec: CacheSpec) -> torch.device:
    """The device for "auto", "cpu" or "cuda". NibbleError when "cuda" was asked for and can't be had."""
    asked = _resolve(asked)
    if asked == "cpu":
        log.info("device: cpu, as asked")
        return torch.device("cpu")
    obstacle = _find_obstacle(config, spec)
    if obstacle is None:
        log.info("device: cuda, %s", torch.cuda.get_device_name())
        return torch.device("cuda", torch.cuda.current_device())
    if asked == "cuda":
        raise NibbleError(f"device: got 'cuda', allowed 'cpu' or 'auto' here: {obstacle}")
    log.info("device: cpu: %s", obstacle)
    return torch.device("cpu")


def _resolve(asked: str) -> str:
    """What limits leave open, the environment may say."""
    if asked == "auto":
        asked = os.environ.get("DEVICE") or "auto"
    if asked not in DEVICES:
        raise NibbleError(f"DEVICE: got {asked!r}, allowed {', '.join(DEVICES)}")
    return asked


def _find_obstacle(config: PretrainedConfig, spec: CacheSpec) -> str | None:
    """What keeps this cache of this model from a GPU; None when nothing does."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if find_spec("triton") is None:
        return "Triton is not installed; install torch with CUDA"
    biased = [layer for layer, transform in spec.key_transforms.items() if transform.bias is not None]
    if biased:
        return f"layers {biased} store K without its bias, which the kernels can't add back"
    try:
        architecture_of(torch.cuda.get_device_capability())
        DecoderShape.of(config)
        group = read_architecture(config.to_dict()).group
        for fmt in set(spec.formats):
            DecodeInstance.for_shape(fmt, spec.head_dim, group)
    except NibbleError as error:
        return str(error)
    return None
