"""Balanced rotation: the change of basis in which 4-bit K (or V) costs its readers least.

Scores are q.k = (B q).(A k) for any invertible A with B = A^-T. Rounding A k to steps that follow its spread s_c in
each channel moves the scores by about sum_c s_c^2 r_c^2, where r_c is the size of B q in channel c. Over all A the
least value of that sum is (sum_i sqrt(l_i))^2 / D, with l_i the eigenvalues of S Q (S: covariance of K within a page,
Q: second moment of q). It is reached when both become the same diagonal matrix sqrt(l), the balanced realisation of
control theory, and a Hadamard matrix then spreads both evenly over the channels:

    A = H diag(l)^(1/4) V^T S^(-1/2)         S^(1/2) Q S^(1/2) = V diag(l) V^T
    B = H diag(l)^(-1/4) V^T S^(1/2)

B is the inverse of A^T however l is rounded, as long as no l is 0. A channel that is always 0 in K and in Q, as under
norms with a weight of 0, has an l below what float64 resolves, of any sign; `SMALLEST_COST` keeps it away from 0.

For V of attention the reader is W_o: with Q = W_o^T W_o the change of basis folds into the weights (`nibble.rotation`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nibble.errors import NibbleError
from nibble.rotation import hadamard_matrix

RIDGE = 1e-2  # of each channel's variance: keeps directions that calibration hardly saw from being blown up
SMALLEST_SHARE = 1e-9  # of the mean variance: lets a constant channel pass
SMALLEST_COST = 1e-12  # of the mean eigenvalue: lets a channel pass that is constant in K and in Q


@dataclass(frozen=True)
class BasisChange:
    """forward: what the stored vectors are multiplied by; reader: what their readers are. float32 [heads, D, D].

    reader^T forward = 1, so that (reader q).(forward k) = q.k.
    """

    forward: torch.Tensor
    reader: torch.Tensor


def balanced_rotation(stored: torch.Tensor, reader: torch.Tensor, ridge: float = RIDGE) -> BasisChange:
    """The basis change of each head.

    stored: covariance of what is stored, within a page; reader: second moment of what reads it; both
    [heads, head_dim, head_dim], symmetric, positive semidefinite, any scale. Computed in float64. NibbleError when a
    head has no variance at all or a number is not finite.
    """
    _check(stored, "covariance of the stored tensor")
    _check(reader, "second moment of its readers")
    spread, weight = (_ridged(matrix.double(), ridge) for matrix in (stored, reader))
    root, inverse_root = _square_roots(spread)
    eigenvalues, vectors = torch.linalg.eigh(root @ weight @ root)
    floor = SMALLEST_COST * eigenvalues.mean(-1, keepdim=True)
    quarter = torch.maximum(eigenvalues, floor).pow(0.25).unsqueeze(-1)
    hadamard = hadamard_matrix(stored.shape[-1]).to(quarter)
    forward = hadamard @ (quarter * vectors.mT @ inverse_root)
    reader = hadamard @ (vectors.mT / quarter @ root)
    return BasisChange(forward.float().contiguous(), reader.float().contiguous())


def _ridged(matrix: torch.Tensor, ridge: float) -> torch.Tensor:
    """Shrunk towards its own diagonal, so that scaling a channel up and its reader down changes nothing."""
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    mean = diagonal.mean(-1, keepdim=True)
    return (matrix + torch.diag_embed(ridge * diagonal + SMALLEST_SHARE * mean)) / mean.unsqueeze(-1)


def _square_roots(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, vectors = torch.linalg.eigh(matrix)
    root = values.sqrt().unsqueeze(-2)
    return (vectors * root) @ vectors.mT, (vectors / root) @ vectors.mT


def _check(matrix: torch.Tensor, what: str) -> None:
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    bad = ~torch.isfinite(matrix).flatten(-2).all(-1) | (diagonal.mean(-1) <= 0)
    if bad.any():
        head = int(bad.nonzero()[0])
        raise NibbleError(f"{what}, head {head}: got zero or not finite; calibrate with more prompts (N=, PROMPTS=)")
