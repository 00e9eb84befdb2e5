"""The running state of a calibration, written every few prompts, so that an interrupt loses nothing.

A state is used again only by a run of the same identity (model, prompts, N, seed, tokens, versions).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from calibrate.ranges import ChannelRange
from nibble import atomic

PARTIAL_FILE = ".calibration.partial.safetensors"

RangeKey = tuple[int, str]


@dataclass(frozen=True)
class Checkpoint:
    """Ranges after the first `done` prompts of the run called `identity`."""

    identity: str
    done: int
    ranges: dict[RangeKey, ChannelRange]


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Replace the folder's checkpoint, atomically."""
    tensors = {}
    for (layer, tensor), channels in checkpoint.ranges.items():
        tensors[f"{layer}.{tensor}.min"] = channels.minimum.contiguous()
        tensors[f"{layer}.{tensor}.max"] = channels.maximum.contiguous()
    state = json.dumps({"identity": checkpoint.identity, "done": checkpoint.done})
    atomic.write_bytes(folder / PARTIAL_FILE, save(tensors, metadata={"state": state}))


def read_checkpoint(folder: Path, identity: str) -> Checkpoint | None:
    """The folder's checkpoint of that run; None when there is none, or it is of another run or damaged."""
    try:
        with safe_open(folder / PARTIAL_FILE, framework="pt") as stream:
            state = json.loads(stream.metadata()["state"])
            keys = sorted({tuple(name.split(".")[:2]) for name in stream.keys()})  # noqa: SIM118  no mapping
            ranges = {
                (int(layer), tensor): ChannelRange(
                    stream.get_tensor(f"{layer}.{tensor}.min"), stream.get_tensor(f"{layer}.{tensor}.max")
                )
                for layer, tensor in keys
            }
    except (OSError, SafetensorError, KeyError, TypeError, json.JSONDecodeError):
        return None
    return Checkpoint(identity, state["done"], ranges) if state["identity"] == identity else None


def remove_checkpoint(folder: Path) -> None:
    """Forget the folder's checkpoint, if there is one."""
    (folder / PARTIAL_FILE).unlink(missing_ok=True)
