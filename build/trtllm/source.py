"""The tensors of a Hugging Face folder, read by name and in part: only the rows or columns that a rank needs."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nibble.errors import NibbleError
from nibble.models import weight_files


class SourceTensors:
    """Open it with `with`. Names are those of transformers (model.layers.0.self_attn.q_proj.weight)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._streams: list[Any] = []
        self._owner: dict[str, Any] = {}

    def __enter__(self) -> SourceTensors:
        for path in weight_files(self._folder):
            try:
                stream = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise NibbleError(f"{path}: can't be read ({error}); fetch the model again") from error
            self._streams.append(stream)
            self._owner.update(dict.fromkeys(stream.keys(), stream))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner.clear()
        self._streams.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._owner

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor. NibbleError when the folder does not hold it."""
        return self._stream(name).get_tensor(name)

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Rows (or, of a vector, elements) first to last - 1."""
        return self._stream(name).get_slice(name)[first:last]

    def columns(self, name: str, first: int, last: int) -> torch.Tensor:
        """Columns first to last - 1 of a matrix."""
        return self._stream(name).get_slice(name)[:, first:last]

    def _stream(self, name: str) -> Any:
        if name not in self._owner:
            raise NibbleError(
                f"{self._folder}: no tensor {name} in its *.safetensors; allowed a complete model of its family"
            )
        return self._owner[name]
