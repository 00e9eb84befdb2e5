"""How a model and its cache are split over GPUs: each has some of the heads and some of the MLP, and the rest whole.

Q, K, V, gate, up    rows of this rank's heads and channels        what comes out is this rank's own
out, down            columns that read them                        what comes out is added up over the ranks
cache                this rank's KV heads, with their scales and bases
embedding, norms, head, the stream between layers                  the same on every rank
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import distributed

from nibble.balance import BasisChange
from nibble.errors import NibbleError
from nibble.key_transform import KeyTransform
from nibble.quantizer import ScaleZero
from nibble.reference import LayerScales
from nibble.runtime.cache import CacheSpec

BY_ROWS = tuple(f"{name}_proj.{kind}" for name in ("q", "k", "v", "gate", "up") for kind in ("weight", "bias"))
BY_COLUMNS = ("o_proj.weight", "down_proj.weight")


@dataclass(frozen=True)
class Shards:
    """This process among those that share a model. group: of torch.distributed, for tensors on the device."""

    rank: int = 0
    size: int = 1
    group: Any = None

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        """A product [tokens, n], or its parts, added up over the ranks: the same bits on each."""
        if self.size == 1:
            return x
        whole = x.sum(0) if x.dim() == 3 else x
        distributed.all_reduce(whole, group=self.group)
        return whole

    def as_first(self, tokens: torch.Tensor) -> torch.Tensor:
        """The first rank's tokens, so that no rounding can part the ranks."""
        if self.size > 1:
            distributed.broadcast(tokens, 0, group=self.group)
        return tokens

    def least(self, value: int, device: torch.device) -> int:
        """The least of the ranks' values."""
        if self.size == 1:
            return value
        found = torch.tensor([value], dtype=torch.int64, device=device)
        distributed.all_reduce(found, op=distributed.ReduceOp.MIN, group=self.group)
        return int(found)

    def part(self, count: int, what: str) -> int:
        """This rank's share of so many heads or channels. NibbleError when they don't come out even."""
        if count % self.size:
            raise NibbleError(f"tensor parallel: got {self.size} GPUs for {count} {what}, allowed a divisor of {count}")
        return count // self.size

    def of_dimension(self, tensor: torch.Tensor, dimension: int) -> torch.Tensor:
        """This rank's part of a whole tensor: a view."""
        return tensor.chunk(self.size, dimension)[self.rank]

    def split_spec(self, spec: CacheSpec) -> CacheSpec:
        """The cache of this rank's KV heads."""
        if self.size == 1:
            return spec
        return replace(
            spec,
            num_kv_heads=self.part(spec.num_kv_heads, "KV heads"),
            scales={layer: LayerScales(self._pair(s.k), self._pair(s.v)) for layer, s in spec.scales.items()},
            key_transforms={layer: self._transform(each) for layer, each in spec.key_transforms.items()},
        )

    def _pair(self, pair: ScaleZero | None) -> ScaleZero | None:
        return pair and ScaleZero(self.of_dimension(pair.scale, 0), self.of_dimension(pair.zero, 0))

    def _transform(self, transform: KeyTransform) -> KeyTransform:
        basis = transform.basis
        if basis is not None:
            basis = BasisChange(self.of_dimension(basis.forward, 0), self.of_dimension(basis.reader, 0))
        return replace(transform, basis=basis)


WHOLE = Shards()  # one rank with everything


@dataclass(frozen=True)
class SplitSource:
    """A source of weights that gives this rank's part; a tensor is whole only while it is read."""

    source: Any  # a WeightSource
    shards: Shards

    def read(self, name: str, target: torch.Tensor) -> None:
        """See `WeightSource.read`."""
        dimension = 0 if name.endswith(BY_ROWS) else 1 if name.endswith(BY_COLUMNS) else None
        if dimension is None:
            self.source.read(name, target)
            return
        shape = list(target.shape)
        shape[dimension] *= self.shards.size
        whole = target.new_empty(shape)
        self.source.read(name, whole)
        target.copy_(self.shards.of_dimension(whole, dimension))
