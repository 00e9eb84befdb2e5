"""What the balanced rotation of K needs to know of a model: how K spreads within a page, and what Q reads it with.

Windows of calibration prompts run through the model once, at offsets spread over all its positions: attention does not
change (RoPE is relative), but Q and K are seen at every angle that RoPE will ever give them. The first page is left
out, since sinks stay in fp16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from nibble.balance import BasisChange, balanced_rotation
from nibble.errors import NibbleError
from nibble.formats import PAGE_TOKENS

NAME = "nibble-key-moments"
WINDOW_TOKENS = 1024
FEWEST_TOKENS = 4 * PAGE_TOKENS


@dataclass
class LayerMoments:
    """Sums over tokens, float64 [num_kv_heads, head_dim, head_dim] unless said otherwise.

    page: K about its page's mean; q, k, v: about zero; k_sum, v_sum: [num_kv_heads, head_dim]; tokens: of k and v.
    """

    page: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_sum: torch.Tensor
    v_sum: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def zero(cls, device: torch.device) -> LayerMoments:
        """Nothing seen yet."""
        return cls(*(torch.zeros((), dtype=torch.float64, device=device) for _ in fields(cls)))

    def add(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """query [1, q_heads, tokens, D], key and value [1, kv_heads, tokens, D]; Q and K after RoPE."""
        full = key.shape[2] // PAGE_TOKENS * PAGE_TOKENS
        pages = key[0, :, PAGE_TOKENS:full].double().unflatten(1, (-1, PAGE_TOKENS))
        centred = (pages - pages.mean(2, keepdim=True)).flatten(1, 2)
        readers = query[0, :, PAGE_TOKENS:].double().unflatten(0, (key.shape[1], -1)).flatten(1, 2)
        keys, values = (tensor[0, :, PAGE_TOKENS:].double() for tensor in (key, value))
        self.page = self.page + centred.mT @ centred
        self.q = self.q + readers.mT @ readers
        self.k, self.v = self.k + keys.mT @ keys, self.v + values.mT @ values
        self.k_sum, self.v_sum = self.k_sum + keys.sum(1), self.v_sum + values.sum(1)
        self.tokens = self.tokens + keys.shape[1]

    def spread(self, tensor: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean [heads, D] and covariance [heads, D, D] of K ("k") or V ("v")."""
        mean = getattr(self, f"{tensor}_sum") / self.tokens
        return mean, getattr(self, tensor) / self.tokens - mean.unsqueeze(-1) * mean.unsqueeze(-2)

    @property
    def q_mean(self) -> torch.Tensor:
        """Second moment of Q, summed over the query heads of a KV head, [heads, D, D]."""
        return self.q / self.tokens

    def basis(self, static: bool) -> BasisChange:
        """The balanced basis of K; static: for zero points that can't follow each page's mean."""
        return balanced_rotation(self.spread("k")[1] if static else self.page, self.q)

    def score_error(self, basis: BasisChange | None) -> float:
        """What fp16 pages in a basis (None: K as it is) do to scores, of the head that it does most to: rms of the
        error over that of the scores, which are taken about the mean of K. Infinite when fp16 can't hold K or Q.

        Keys and queries are as many points as there are channels, times two for K, which have exactly the moments seen:
        mean +- sqrt(D l) v for each eigenvalue l and eigenvector v. Every direction counts, also those hardly seen.
        """
        mean, covariance = self.spread("k")
        around, queries = _points(covariance), _points(self.q_mean)
        keys = torch.cat((mean.unsqueeze(-2) + around, mean.unsqueeze(-2) - around), -2)
        stored, read = keys, queries
        if basis is not None:
            stored, read = keys @ basis.forward.double().mT, queries @ basis.reader.double().mT
        error = read.half().double() @ stored.half().double().mT - queries @ keys.mT
        scores = queries @ around.mT
        return float((error.norm(dim=(-2, -1)) / scores.norm(dim=(-2, -1)) / 2**0.5).nan_to_num(torch.inf).amax())


def balance_keys(model: PreTrainedModel, windows: torch.Tensor, positions: int) -> list[BasisChange]:
    """The basis of each layer's K, as in `collect_moments`."""
    return [layer_basis(layer, found) for layer, found in enumerate(collect_moments(model, windows, positions))]


def layer_basis(layer: int, moments: LayerMoments, static: bool = False) -> BasisChange:
    """The basis of one layer's K. Raises NibbleError naming the layer: NaN, Inf, or a head without variance."""
    try:
        return moments.basis(static)
    except NibbleError as error:
        raise NibbleError(f"layer {layer} K: {error}") from error


def _points(moment: torch.Tensor) -> torch.Tensor:
    """[heads, D, D]: D vectors whose second moment is `moment`."""
    values, vectors = torch.linalg.eigh(moment)
    return (moment.shape[-1] * values.clamp_min(0)).sqrt().unsqueeze(-1) * vectors.mT


@torch.inference_mode()
def collect_moments(model: PreTrainedModel, windows: torch.Tensor, positions: int) -> list[LayerMoments]:
    """The moments of each layer, on the CPU.

    windows: int64 [windows, tokens]; positions: how far offsets reach. The model's attention function is as before when
    done. Raises NibbleError when windows are too short, or naming a layer that was never called.
    """
    count, length = windows.shape
    if length < FEWEST_TOKENS:
        raise NibbleError(f"balancing K: got windows of {length} tokens, allowed {FEWEST_TOKENS} or more")
    moments: dict[int, LayerMoments] = {}

    def attention(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *arguments: Any, **options: Any
    ) -> Any:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        moments.setdefault(layer, LayerMoments.zero(key.device)).add(query, key, value)
        return sdpa_attention_forward(module, query, key, value, *arguments, **options)

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    for window, offset in zip(windows, _offsets(count, positions - length), strict=True):
        at = offset + torch.arange(length, device=model.device)
        model.base_model(window[None].to(model.device), position_ids=at[None], use_cache=False)
    model.set_attn_implementation(before)
    missing = set(range(model.config.num_hidden_layers)) - set(moments)
    if missing:
        raise NibbleError(f"balancing K: layer {min(missing)}: its attention was never called")
    return [
        LayerMoments(*(getattr(moments[layer], field.name).cpu() for field in fields(LayerMoments)))
        for layer in range(model.config.num_hidden_layers)
    ]


def _offsets(count: int, furthest: int) -> Iterator[int]:
    """`count` positions from 0 to `furthest`, evenly spread."""
    return (max(0, furthest) * index // max(1, count - 1) for index in range(count))
