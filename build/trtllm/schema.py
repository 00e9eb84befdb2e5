"""What TensorRT-LLM 1.2.1 accepts, recorded as data (data/*.json, each with its source), and the checks against it.

TensorRT-LLM can't be installed where engines are planned, so its rules are kept as data beside the code that obeys
them: argument parser, keys of config.json, names, shapes and types of the checkpoint's tensors.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from nibble.errors import NibbleError

DATA = Path(__file__).resolve().parent / "data"
TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool, "dict": dict, "list": list}


@cache
def read_data(name: str) -> dict[str, Any]:
    """A recorded file of data/ by its name without .json."""
    return dict(json.loads((DATA / f"{name}.json").read_text(encoding="utf-8")))


@dataclass(frozen=True)
class TensorRule:
    """One tensor of a checkpoint. hf: the Hugging Face tensors it is made of. shape: names of `sizes`.

    split: how tensor parallel ranks share it: none, rows, columns, qkv. stage: pipeline stage outside the layers.
    """

    name: str
    hf: tuple[str, ...]
    shape: tuple[str, ...]
    split: str
    dtype: str | None = None
    when: str | None = None
    stage: str | None = None


def tensor_rules(group: str) -> list[TensorRule]:
    """The rules of a group, "layer" or "outside_layers"."""
    rows = read_data("checkpoint")[group]
    return [TensorRule(**{**row, "hf": tuple(row["hf"]), "shape": tuple(row["shape"])}) for row in rows]


def check_config(config: dict[str, Any]) -> None:
    """NibbleError naming the first key of a checkpoint's config.json that is missing, of another type or value."""
    rules = read_data("checkpoint")["config"]
    for owner, part, kinds in (
        ("", config, rules["required"]),
        ("mapping.", config.get("mapping") or {}, rules["mapping"]),
        ("quantization.", config.get("quantization") or {}, rules["quantization"]),
    ):
        for key, kind in kinds.items():
            if key not in part:
                raise NibbleError(f"TensorRT-LLM config.json: missing key {owner}{key}; allowed {kind}")
            if not _is_of_kind(part[key], kind):
                raise NibbleError(f"TensorRT-LLM config.json: key {owner}{key}: got {part[key]!r}, allowed {kind}")
    _check_one_of("quantization.kv_cache_quant_algo", config["quantization"]["kv_cache_quant_algo"], rules)
    _check_one_of("dtype", config["dtype"], rules)
    architectures = [family["architecture"] for family in read_data("checkpoint")["families"].values()]
    if config["architecture"] not in architectures:
        raise NibbleError(
            f"TensorRT-LLM config.json: key architecture: got {config['architecture']!r}, allowed "
            f"{', '.join(architectures)}"
        )
    scaling = config["rotary_scaling"]
    kind = scaling.get("type", scaling.get("rope_type")) if scaling else None
    if kind is not None and kind not in rules["rope_types"]:
        raise NibbleError(
            f"TensorRT-LLM config.json: key rotary_scaling: got type {kind!r}, allowed null or "
            f"{', '.join(rules['rope_types'])}"
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise NibbleError(f"trtllm-build: {message}; the flags of 1.2.1 are in build/trtllm/data/build_arguments.json")


@cache
def build_parser() -> argparse.ArgumentParser:
    """The argument parser of trtllm-build, as recorded. It raises NibbleError where argparse would exit."""
    parser = _Parser(prog="trtllm-build", add_help=False, allow_abbrev=False)
    kinds = {"int": int, "str": str}
    for flag in read_data("build_arguments")["flags"]:
        name = "--" + flag["name"]
        if flag["type"] == "flag":
            parser.add_argument(name, action="store_true")
            continue
        default = argparse.SUPPRESS if flag.get("default") == "absent" else flag.get("default")
        parser.add_argument(
            name, type=kinds[flag["type"]], default=default, choices=flag.get("choices"), nargs=flag.get("nargs")
        )
    return parser


def _is_of_kind(value: Any, kind: str) -> bool:
    if value is None:
        return kind.endswith("or null")
    wanted = kind.split(" ")[0]
    if wanted == "float":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, TYPES[wanted]) and (wanted == "bool" or not isinstance(value, bool))


def _check_one_of(key: str, value: Any, rules: dict[str, Any]) -> None:
    allowed = rules[key.rsplit(".", 1)[-1]]
    if value not in allowed:
        raise NibbleError(
            f"TensorRT-LLM config.json: key {key}: got {value!r}, allowed {', '.join(map(str, allowed))}. int4 can't "
            "be in an engine: it runs through the PyTorch runtime (KV=int4 HOST=trtllm)"
        )
