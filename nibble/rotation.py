"""The Hadamard rotation of V, folded into the weights so that it costs nothing when serving.

Attention is linear in V, so for an orthogonal R and attention weights p

    W_o sum_t p_t v_t  =  (W_o R^T) sum_t p_t (R v_t)

W_v becomes R W_v, W_o becomes W_o R^T, the cache holds R v, whose outliers are spread over all channels, and the
model's output is the same.
"""

from __future__ import annotations

import torch
from torch import nn

from nibble.errors import NibbleError


def hadamard_matrix(head_dim: int) -> torch.Tensor:
    """Orthogonal float64 [head_dim, head_dim].

    A head size that is no power of two gets equal diagonal blocks of the largest power of two that divides it
    (96: three blocks of 32). Sylvester's construction: H_2n = [[H_n, H_n], [H_n, -H_n]].
    """
    size = head_dim & -head_dim
    block = torch.ones(1, 1, dtype=torch.float64)
    while len(block) < size:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    return torch.block_diag(*[block / size**0.5] * (head_dim // size))


def rotate(values: torch.Tensor) -> torch.Tensor:
    """R v for every v in values [..., head_dim], in their own type."""
    return values @ hadamard_matrix(values.shape[-1]).T.to(values)


@torch.no_grad()
def fold_value_rotation(attention: nn.Module, head_dim: int) -> None:
    """Fold the rotation into one attention layer's v_proj (weight and bias) and o_proj, in place.

    Computed in float64 and rounded once to the weights' type. Raises NibbleError if the layer has no v_proj and o_proj.
    """
    v_proj, o_proj = getattr(attention, "v_proj", None), getattr(attention, "o_proj", None)
    if not (isinstance(v_proj, nn.Linear) and isinstance(o_proj, nn.Linear)):
        raise NibbleError(
            f"V rotation: got {type(attention).__name__} without linear v_proj and o_proj; use a KV format that does "
            "not rotate V (int8, int8-static, fp16)"
        )
    fold_value_rotation_into(v_proj.weight, v_proj.bias, o_proj.weight, head_dim)


@torch.no_grad()
def fold_value_rotation_into(
    v_weight: torch.Tensor, v_bias: torch.Tensor | None, o_weight: torch.Tensor, head_dim: int
) -> None:
    """The same for bare tensors: W_v [kv_heads * head_dim, hidden], its bias, W_o [hidden, q_heads * head_dim]."""
    rotate_output_rows(v_weight, head_dim)
    if v_bias is not None:
        rotate_output_rows(v_bias[:, None], head_dim)
    rotate_input_columns(o_weight, head_dim)


@torch.no_grad()
def rotate_output_rows(weight: torch.Tensor, head_dim: int) -> None:
    """R W in place, for W [heads * head_dim, n]: what the weight gives comes out rotated."""
    rotation = hadamard_matrix(head_dim).to(weight.device)
    weight.copy_((rotation @ weight.double().unflatten(0, (-1, head_dim))).flatten(0, 1))


@torch.no_grad()
def rotate_input_columns(weight: torch.Tensor, head_dim: int) -> None:
    """W R^T in place, for W [n, heads * head_dim]: what the weight takes may come rotated."""
    rotation = hadamard_matrix(head_dim).to(weight.device)
    weight.copy_((weight.double().unflatten(1, (-1, head_dim)) @ rotation.T).flatten(1))
