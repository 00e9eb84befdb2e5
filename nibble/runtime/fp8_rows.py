"""Matrices in e4m3, a byte an entry: each row has its own scale, so that its largest entry becomes the largest code.

    row i stands for  values[i] * scales[i]

A weight's rows are output channels, an activation's rows are tokens; a product of both is

    out[m, n] = x.scales[m] * weight.scales[n] * sum over k of x.values[m, k] * weight.values[n, k]

A token's row depends on that token alone, so the batch it is computed in changes nothing but the order of the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
SMALLEST_SCALE = 1e-12  # of a row of zeros


@dataclass(frozen=True)
class Fp8Rows:
    """values: e4m3 [rows, k]; scales: fp32 [rows]."""

    values: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def empty(cls, rows: int, width: int, device: torch.device) -> Fp8Rows:
        """Room for a matrix."""
        return cls(
            torch.empty(rows, width, dtype=E4M3, device=device), torch.empty(rows, dtype=torch.float32, device=device)
        )

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def num_bytes(self) -> int:
        return self.values.numel() + 4 * self.scales.numel()

    def part(self, start: int, rows: int) -> Fp8Rows:
        """Some of the rows: views."""
        return Fp8Rows(self.values[start : start + rows], self.scales[start : start + rows])

    def fill(self, matrix: torch.Tensor) -> None:
        """Quantize a matrix of this shape into this one."""
        scales = row_scales(matrix)
        self.scales.copy_(scales)
        self.values.copy_((matrix / scales[:, None]).clamp_(-LARGEST, LARGEST))

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The matrix that the codes stand for."""
        return (self.values.float() * self.scales[:, None]).to(dtype)


def row_scales(matrix: torch.Tensor) -> torch.Tensor:
    """fp32 [rows]: the largest magnitude of each row over the largest code."""
    return (matrix.abs().amax(-1).float() / LARGEST).clamp_(min=SMALLEST_SCALE)


def quantize_rows(x: torch.Tensor) -> Fp8Rows:
    """Activations [tokens, k] in e4m3, a scale a token."""
    if x.is_cuda:
        from nibble.runtime.fp8_kernels import launch_quantize_rows

        return launch_quantize_rows(x)
    out = Fp8Rows.empty(*x.shape, x.device)  # type: ignore[call-arg]
    out.fill(x)
    return out
