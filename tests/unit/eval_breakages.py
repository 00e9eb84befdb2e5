"""Ways to break a cache on purpose, for tests of the evaluation: each breaks one layer and nothing else.

A seal breakage changes the bytes of sealed pages after the engine wrote them, as a wrong kernel would; an engine
breakage changes what the engine was built with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nibble.formats import SealedPageLayout
from nibble.reference import LayerScales
from nibble.rotation import hadamard_matrix
from nibble.runtime import Engine
from nibble.runtime.step import Step

SpoilPage = Callable[[torch.Tensor, SealedPageLayout], None]


@contextmanager
def spoiled_seal(engine: Engine, layer: int, spoil: SpoilPage) -> Iterator[None]:
    """While the block runs, every page that the engine seals in that layer is spoiled."""
    backend: Any = engine.runner.backend
    seal = backend.seal

    def seal_and_spoil(index: int, step: Step) -> None:
        seal(index, step)
        if index == layer and step.seal_pairs:
            pages = backend.storage.sealed[index][step.seal_to]
            spoil(pages, backend.storage.layouts[index])
            backend.storage.sealed[index][step.seal_to] = pages

    backend.seal = seal_and_spoil
    try:
        yield
    finally:
        backend.seal = seal


def swap_key_scales(page: torch.Tensor, layout: SealedPageLayout) -> None:
    """Every KV head of K gets its neighbour's scales."""
    scale, _ = _parameters(page, layout.k_parameters)
    scale.copy_(scale.roll(1, dims=-2))


def shift_value_zero(page: torch.Tensor, layout: SealedPageLayout) -> None:
    """V's zero points are one step too high."""
    scale, zero = _parameters(page, layout.v_parameters)
    zero.add_(scale)


def shift_key_zero(page: torch.Tensor, layout: SealedPageLayout) -> None:
    """K's zero points are one step too high."""
    scale, zero = _parameters(page, layout.k_parameters)
    zero.add_(scale)


@torch.no_grad()
def leave_output_unrotated(engine: Engine, layer: int) -> None:
    """V is stored rotated and read as if it were not: the rotation is taken out of o_proj again."""
    attention: Any = engine.runner.model.model.layers[layer].self_attn
    rotation = hadamard_matrix(engine.spec.head_dim)
    weight = attention.o_proj.weight
    weight.copy_((weight.double().unflatten(1, (-1, engine.spec.head_dim)) @ rotation).flatten(1))


@torch.no_grad()
def leave_value_unrotated(engine: Engine, layer: int) -> None:
    """V is not rotated at all: right but for what quantization then costs."""
    leave_output_unrotated(engine, layer)
    attention: Any = engine.runner.model.model.layers[layer].self_attn
    rotation = hadamard_matrix(engine.spec.head_dim)
    weight = attention.v_proj.weight
    weight.copy_((rotation.T @ weight.double().unflatten(0, (-1, engine.spec.head_dim))).flatten(0, 1))


def swap_static_scales(engine: Engine, layer: int) -> None:
    """A layer's static scales of K and V are each other's."""
    scales = engine.spec.scales[layer]
    engine.spec.scales[layer] = LayerScales(scales.v, scales.k)


def _parameters(page: torch.Tensor, where: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the scales and the zero points of K or V."""
    half = (where.stop - where.start) // 2
    scale, zero = page[..., where.start : where.start + half], page[..., where.start + half : where.stop]
    return scale.view(torch.float16), zero.view(torch.float16)
