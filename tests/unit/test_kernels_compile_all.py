"""Every instance of every kernel compiles for every architecture, within its registers; no GPU needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from nibble.kernels import compile as compile_stage
from nibble.kernels.compiler import ARCHITECTURES
from nibble.kernels.instances import KERNEL_HEAD_DIMS

pytestmark = pytest.mark.compiler


@pytest.mark.parametrize("head_dim", KERNEL_HEAD_DIMS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_keeps_its_registers(
    architecture: str, head_dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="compiling kernels needs cuda-bindings and nvidia-cuda-nvrtc")
    monkeypatch.setenv("NIBBLE_KERNEL_CACHE", str(tmp_path))
    options = ["--arch", architecture, "--head-dim", str(head_dim), "--check"]
    assert compile_stage.main(options) == 0
