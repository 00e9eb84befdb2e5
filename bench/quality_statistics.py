"""What the quality bench knows of a model before it measures: samples of Q, K and V from calibration text.

From them come the basis changes (`nibble.balance`) and the ranges of static formats. Nothing of the evaluation text
enters.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from bench.quality_attention import Layer
from nibble.balance import BasisChange, balanced_rotation
from nibble.formats import PAGE_TOKENS
from nibble.rotation import hadamard_matrix

BASES = ("none", "hadamard", "diagonal", "balanced", "balanced-static")


@dataclass
class LayerStatistics:
    """Samples of one layer: q, k, v [windows, heads, tokens, D]; output: W_o^T W_o of each KV head [heads, D, D].

    bias: what k_proj's bias adds to K at each position [heads, positions, D]; biased: its large channels [heads, D].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    output: torch.Tensor
    bias: torch.Tensor | None = None
    biased: torch.Tensor | None = None
    _bases: dict[tuple[str, str], BasisChange | None] = field(default_factory=dict)

    def basis(self, tensor: str, kind: str) -> BasisChange | None:
        """The basis change of K ("k") or V ("v"); None when there is none."""
        if (tensor, kind) not in self._bases:
            self._bases[tensor, kind] = self._make_basis(tensor, kind)
        return self._bases[tensor, kind]

    def stored(self, tensor: str, kind: str) -> torch.Tensor:
        """The samples behind the first page, in a basis: [heads, all tokens, D]."""
        samples = getattr(self, tensor)[:, :, PAGE_TOKENS:].transpose(0, 1).flatten(1, 2)
        basis = self.basis(tensor, kind)
        return samples if basis is None else samples @ basis.forward.mT

    def reader_moment(self, tensor: str) -> torch.Tensor:
        """Second moment of what reads the tensor, [heads, D, D]."""
        if tensor == "v":
            return self.output.double()
        heads = self.k.shape[1]
        q = self.q[:, :, 2 * PAGE_TOKENS :].unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 3).double()
        return q.mT @ q / q.shape[1]

    def covariance(self, tensor: str, static: bool = False) -> torch.Tensor:
        """K: covariance inside a page (the zero points take the page's mean); V, static K: about the mean of all."""
        values = getattr(self, tensor)[:, :, PAGE_TOKENS:].double()
        full = values.shape[2] // PAGE_TOKENS * PAGE_TOKENS
        pages = values[:, :, :full].unflatten(2, (-1, PAGE_TOKENS))
        centre = pages.mean(3, keepdim=True) if tensor == "k" and not static else pages.mean((0, 2, 3), keepdim=True)
        flat = (pages - centre).transpose(0, 1).flatten(1, 3)
        return flat.mT @ flat / flat.shape[1]

    def _make_basis(self, tensor: str, kind: str) -> BasisChange | None:
        if kind == "none":
            return None
        size, heads = self.k.shape[-1], self.k.shape[1]
        if kind == "hadamard":
            matrix = hadamard_matrix(size).float().to(self.k.device).expand(heads, -1, -1)
            return BasisChange(matrix, matrix)
        stored = self.covariance(tensor, static=kind == "balanced-static")
        reader = self.reader_moment(tensor)
        if kind == "diagonal":
            stored, reader = (torch.diag_embed(m.diagonal(dim1=-2, dim2=-1)) for m in (stored, reader))
        return balanced_rotation(stored, reader)


class SampleCollector:
    """Gathers the samples while calibration windows run (`quality_attention.HOOK.seen`)."""

    def __init__(self) -> None:
        self._layers: dict[int, list[Layer]] = {}

    def __call__(self, layer: Layer) -> None:
        self._layers.setdefault(layer.index, []).append(layer)

    def statistics(self, model: PreTrainedModel) -> list[LayerStatistics]:
        """One for each layer."""
        found = []
        for index, block in enumerate(model.model.layers):
            seen = self._layers[index]
            q, k, v = (torch.cat([getattr(layer, name) for layer in seen]) for name in "qkv")
            output = block.self_attn.o_proj.weight.double().unflatten(1, (k.shape[1], -1, k.shape[-1]))
            found.append(LayerStatistics(q, k, v, torch.einsum("okgd,okge->kde", output, output)))
        return found
