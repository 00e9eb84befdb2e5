"""The recorded models of TensorRT-LLM's Triton backend (data/models.yaml), as protobuf configurations.

>>> [row.name for row in rows("postprocessing", "inputs")]
['TOKENS_BATCH', 'SEQUENCE_LENGTH']
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc.model_config_pb2 import ModelConfig

DATA = Path(__file__).resolve().parent / "data" / "models.yaml"
LOGITS = "FP32"  # logits_dtype of our checkpoints
Side = Literal["inputs", "outputs"]


@dataclass(frozen=True)
class Row:
    """One input or output. dims: without the batch dimension; flags: optional, ragged, scalar."""

    name: str
    data_type: str
    dims: tuple[int, ...]
    flags: frozenset[str]


@cache
def recorded(model: str) -> dict[str, Any]:
    """What is recorded of a model."""
    return dict(yaml.safe_load(DATA.read_text(encoding="utf-8"))[model])


def rows(model: str, side: Side) -> list[Row]:
    """Inputs or outputs of a model, in the real order."""
    return [_row(line) for line in recorded(model)[side].splitlines()]


def base_config(model: str, name: str, backend: str) -> ModelConfig:
    """A configuration with the model's inputs and outputs, and one instance on the CPU side."""
    config = ModelConfig(name=name, backend=backend)
    for row in rows(model, "inputs"):
        entry = config.input.add(name=row.name, data_type=_data_type(row), dims=row.dims)
        entry.optional, entry.allow_ragged_batch = "optional" in row.flags, "ragged" in row.flags
        if "scalar" in row.flags:
            entry.reshape.SetInParent()  # an empty shape: a number
    for row in rows(model, "outputs"):
        config.output.add(name=row.name, data_type=_data_type(row), dims=row.dims)
    config.instance_group.add(count=1, kind=model_config_pb2.ModelInstanceGroup.KIND_CPU)
    return config


def ensemble_config() -> ModelConfig:
    """The ensemble of the three models, without instances: an ensemble has none."""
    config = base_config("ensemble", "ensemble", "")
    config.platform = "ensemble"
    del config.instance_group[:]
    for model, step in recorded("ensemble")["steps"].items():
        entry = config.ensemble_scheduling.step.add(model_name=model, model_version=-1)
        entry.input_map.update(_pairs(step["inputs"]))
        entry.output_map.update(_pairs(step["outputs"]))
    return config


def _row(line: str) -> Row:
    name, data_type, dims, *flags = line.split()
    return Row(name, data_type, tuple(int(size) for size in dims.split(",")), frozenset(flags))


def _pairs(text: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in text.split())


def _data_type(row: Row) -> int:
    name = LOGITS if row.data_type == "LOGITS" else row.data_type
    return int(model_config_pb2.DataType.Value(f"TYPE_{name}"))
