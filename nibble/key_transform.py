"""What a layer does to K before it is stored, so that few bits say more: a bias taken off, a change of basis.

    stored  =  forward (K - R_t b)           R_t: RoPE at position t, b: the bias of k_proj
    scores  =  (reader q) . (stored + forward R_t b)  =  q . K

Both are exact: only what quantization then costs changes. The format of pages knows nothing of them. The basis comes
from calibration (`nibble.balance`); the bias part of K is known from the weights and depends on position alone, so a
bias of hundreds, as in Qwen2, need not be stored at all.

    kv_keys.safetensors   layers.{i}.k.{forward,reader}   float32 [num_kv_heads, head_dim, head_dim]
                          layers.{i}.k.bias               float32 [num_kv_heads, head_dim], before RoPE
                          layers.{i}.k.{frequencies,scaling}   of RoPE, beside a bias
                          layers.{i}.v.rotated            there when V is rotated whatever its format says
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from nibble.balance import BasisChange
from nibble.errors import NibbleError

KEYS_FILE = "kv_keys.safetensors"
NAME = re.compile(r"layers\.(\d+)\.[kv]\.")
INVERSE_TOLERANCE = 1e-3  # of reader^T forward = 1


@dataclass(frozen=True)
class KeyBias:
    """The bias of k_proj, and how RoPE turns it: channel c with channel c + n/2 of the first n; the rest stands still.

    values: float32 [num_kv_heads, head_dim]; frequencies: float32 [n / 2], radians a token; scaling: of cos and sin.
    """

    values: torch.Tensor
    frequencies: torch.Tensor
    scaling: float = 1.0

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """R_t b at positions [tokens]: float32 [tokens, num_kv_heads, head_dim]."""
        angles = (positions.float()[:, None] * self.frequencies)[:, None]  # fp32, as transformers does it
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        turning = 2 * len(self.frequencies)
        low, high = self.values[:, :turning].chunk(2, -1)
        still = self.values[:, turning:].expand(len(positions), -1, -1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin, still), -1)


@dataclass(frozen=True)
class KeyTransform:
    """basis: see `nibble.balance`; bias: taken off K before it is stored. Either may be None.

    rotate_value: V is rotated as `nibble.rotation` says although its format does not ask for it.
    """

    basis: BasisChange | None = None
    bias: KeyBias | None = None
    rotate_value: bool = False

    def store(self, k: torch.Tensor) -> torch.Tensor:
        """K [tokens, num_kv_heads, head_dim] in the basis, float32 when there is one."""
        return k if self.basis is None else torch.einsum("thd,hed->the", k.float(), self.basis.forward)

    def read(self, q: torch.Tensor) -> torch.Tensor:
        """Q [tokens, q_heads, head_dim] for keys in the basis, in q's type."""
        if self.basis is None:
            return q
        grouped = q.float().unflatten(1, (self.basis.reader.shape[0], -1))
        return torch.einsum("thgd,hed->thge", grouped, self.basis.reader).flatten(1, 2).to(q.dtype)

    def offset(self, positions: torch.Tensor) -> torch.Tensor | None:
        """What is taken off K (in the basis) at `positions` and comes back when it is read, [tokens, heads, D]."""
        return None if self.bias is None else self.store(self.bias.at(positions))

    def to(self, device: torch.device) -> KeyTransform:
        """The same on a device."""
        basis, bias = self.basis, self.bias
        if basis is not None:
            basis = BasisChange(basis.forward.to(device), basis.reader.to(device))
        if bias is not None:
            bias = KeyBias(bias.values.to(device), bias.frequencies.to(device), bias.scaling)
        return KeyTransform(basis, bias, self.rotate_value)


def write_key_transforms(folder: Path, transforms: dict[int, KeyTransform]) -> None:
    """Write kv_keys.safetensors; nothing when there are none."""
    tensors = {}
    for layer, transform in transforms.items():
        if transform.basis is not None:
            tensors[f"layers.{layer}.k.forward"] = transform.basis.forward.contiguous()
            tensors[f"layers.{layer}.k.reader"] = transform.basis.reader.contiguous()
        if transform.bias is not None:
            bias = transform.bias
            tensors[f"layers.{layer}.k.bias"] = bias.values.float().contiguous()
            tensors[f"layers.{layer}.k.frequencies"] = bias.frequencies.float().contiguous()
            tensors[f"layers.{layer}.k.scaling"] = torch.tensor([bias.scaling])
        if transform.rotate_value:
            tensors[f"layers.{layer}.v.rotated"] = torch.ones(1)
    if tensors:
        save_file(tensors, folder / KEYS_FILE)


def read_key_transforms(folder: Path) -> dict[int, KeyTransform]:
    """The transforms of an engine by layer, {} when it has none. Raises NibbleError naming file and layer."""
    path = folder / KEYS_FILE
    if not path.is_file():
        return {}
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise NibbleError(f"{path}: can't be read ({error}); run `make engine` again") from error
    found = {name: NAME.match(name) for name in tensors}
    if unknown := next((name for name, match in found.items() if match is None), None):
        raise NibbleError(f"{path}: got tensor {unknown!r}, allowed layers.<number>.<k or v>.<part>; build it again")
    layers = sorted({int(match[1]) for match in found.values() if match})
    return {layer: _read_layer(path, tensors, layer) for layer in layers}


def _read_layer(path: Path, tensors: dict[str, torch.Tensor], layer: int) -> KeyTransform:
    names = ("forward", "reader", "bias", "frequencies", "scaling")
    forward, reader, values, frequencies, scaling = (tensors.get(f"layers.{layer}.k.{name}") for name in names)
    for pair, parts in (("forward, reader", (forward, reader)), ("bias, frequencies", (values, frequencies, scaling))):
        if any(part is None for part in parts) != all(part is None for part in parts):
            raise NibbleError(f"{path}: layer {layer} K: {pair} are not all there; run `make engine` again")
        if any(part is not None and not torch.isfinite(part).all() for part in parts):
            raise NibbleError(
                f"{path}: layer {layer} K: NaN or Inf in {pair}; run `make calibrate`, then `make engine`"
            )
    rotate_value = f"layers.{layer}.v.rotated" in tensors
    bias = None
    if values is not None and frequencies is not None and scaling is not None:
        bias = KeyBias(values, frequencies, float(scaling))
    if forward is None or reader is None:
        return KeyTransform(None, bias, rotate_value)
    identity = torch.eye(forward.shape[-1], dtype=torch.float64)
    error = float((reader.double().mT @ forward.double() - identity).abs().max())
    if not error <= INVERSE_TOLERANCE:
        raise NibbleError(
            f"{path}: layer {layer} K: reader^T forward differs from 1 by {error:g}, allowed {INVERSE_TOLERANCE:g}; "
            "run `make calibrate`, then `make engine`"
        )
    return KeyTransform(BasisChange(forward, reader), bias, rotate_value)
