"""What a worker takes from a native engine: format, policy, bases of K and static scales of its layers and KV heads.

The engine is the one of `make engine` with HOST=native; a rank of tensor parallel takes its own heads of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from nibble.balance import BasisChange
from nibble.errors import NibbleError
from nibble.formats import PAGE_TOKENS, KVFormat, SealedPageLayout
from nibble.key_transform import KeyTransform, read_key_transforms
from nibble.quantizer import ScaleZero
from nibble.reference import LayerScales
from nibble.static_scales import read_static_scales
from nibble.visibility import PagePolicy

KV_PARTS = 2  # a block of TensorRT-LLM has a part for K and one for V; ours fill both as one run of bytes


@dataclass(frozen=True)
class CacheEngine:
    """The cache of one model. transforms: of layers that have one."""

    fmt: KVFormat
    policy: PagePolicy
    num_layers: int
    num_kv_heads: int
    head_dim: int
    scales: list[LayerScales]
    transforms: dict[int, KeyTransform]

    @classmethod
    def load(cls, folder: Path) -> CacheEngine:
        """Read and verify a native engine. Raises NibbleError for one that this host can't run."""
        from nibble.manifest import read_manifest

        manifest = read_manifest(folder)
        formats, transforms = manifest.layer_formats(), read_key_transforms(folder)
        policy = PagePolicy(manifest.policy.sink_pages, manifest.policy.recent_pages)
        _check_layers(formats, transforms)
        model = manifest.model
        scales = read_static_scales(folder, formats)
        engine = cls(formats[0], policy, model.num_layers, model.num_kv_heads, model.head_dim, scales, transforms)
        engine.check_block()
        return engine

    @property
    def page_bytes(self) -> int:
        """Bytes of one sealed page of one KV head."""
        return SealedPageLayout(self.fmt, self.head_dim).page_bytes

    @property
    def stored_head_dim(self) -> int:
        """The head size that makes a block of TensorRT-LLM, one byte an element, exactly one of our pages."""
        return self.page_bytes // (KV_PARTS * PAGE_TOKENS)

    def check_block(self) -> None:
        """NibbleError when no block of TensorRT-LLM has a page's size."""
        if self.page_bytes % (KV_PARTS * PAGE_TOKENS):
            raise NibbleError(
                f"head size {self.head_dim} with {self.fmt.name}: a page of {self.page_bytes} bytes is no whole number "
                "of bytes a token, which TensorRT-LLM's blocks need; use HOST=native"
            )

    def rotates_value(self, layer: int) -> bool:
        """True when V is rotated before it is stored."""
        transform = self.transforms.get(layer)
        return self.fmt.v.rotated or (transform is not None and transform.rotate_value)

    def for_heads(self, first: int, count: int) -> CacheEngine:
        """The same for KV heads `first` to `first + count - 1`."""
        heads = slice(first, first + count)
        scales = [LayerScales(_heads(layer.k, heads), _heads(layer.v, heads)) for layer in self.scales]
        transforms = {}
        for index, transform in self.transforms.items():
            basis = transform.basis
            if basis is not None:
                basis = BasisChange(basis.forward[heads].contiguous(), basis.reader[heads].contiguous())
            transforms[index] = KeyTransform(basis, None, transform.rotate_value)
        return CacheEngine(self.fmt, self.policy, self.num_layers, count, self.head_dim, scales, transforms)

    def to(self, device: torch.device) -> CacheEngine:
        """The same with its tensors on a device."""
        scales = [LayerScales(_moved(layer.k, device), _moved(layer.v, device)) for layer in self.scales]
        transforms = {index: transform.to(device) for index, transform in self.transforms.items()}
        return CacheEngine(self.fmt, self.policy, self.num_layers, self.num_kv_heads, self.head_dim, scales, transforms)


def local_heads(num_kv_heads: int, tensor: int, place: int) -> tuple[int, int]:
    """First KV head and number of heads of a tensor parallel rank; fewer heads than ranks are repeated."""
    if num_kv_heads >= tensor:
        return place * (num_kv_heads // tensor), num_kv_heads // tensor
    return place // (tensor // num_kv_heads), 1


def _check_layers(formats: list[KVFormat], transforms: dict[int, KeyTransform]) -> None:
    first = formats[0]
    for layer, fmt in enumerate(formats):
        if (fmt.k, fmt.v) != (first.k, first.v):
            raise NibbleError(
                f"layer {layer} is stored as {fmt.name}, layer 0 as {first.name}: TensorRT-LLM's blocks have one size "
                "for all layers. Build with a format that all layers can have (KV=k8v4 or int8), or use HOST=native"
            )
    for layer, transform in transforms.items():
        if transform.bias is not None:
            raise NibbleError(
                f"layer {layer}: its K is stored without the bias of k_proj, which the CUDA kernels can't add back "
                "yet. Build with KV=k8v4, or use HOST=native"
            )


def _heads(part: ScaleZero | None, heads: slice) -> ScaleZero | None:
    return None if part is None else ScaleZero(part.scale[heads].contiguous(), part.zero[heads].contiguous())


def _moved(part: ScaleZero | None, device: torch.device) -> ScaleZero | None:
    return None if part is None else ScaleZero(part.scale.to(device), part.zero.to(device))
