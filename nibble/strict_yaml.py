"""Strict reading of recipe files: a YAML mapping into a frozen pydantic model, or an error a person can act on.

Nothing is guessed: a key that is unknown, missing, repeated, of another type or out of range stops the run, and the
message names the file, the key, what was got and what is allowed.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import annotated_types
import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from nibble.errors import NibbleError


class StrictModel(BaseModel):
    """Frozen, no unknown keys, no conversion between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Model = TypeVar("Model", bound=StrictModel)


def read_mapping(path: Path) -> dict[str, Any]:
    """The YAML mapping in a file; NibbleError when it can't be read, is no mapping or repeats a key."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise NibbleError(f"{path}: can't be read as YAML: {error}") from error
    if not isinstance(content, dict):
        raise NibbleError(f"{path}: got {type(content).__name__} at the top, allowed a mapping of keys")
    return content


def validate(model: type[Model], values: dict[str, Any], origin: str) -> Model:
    """Build `model` from values; NibbleError names `origin` (a file, or the command line) and every wrong key."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        complaints = [_complaint(model, problem) for problem in error.errors()]
        raise NibbleError("\n".join(f"{origin}: {complaint}" for complaint in complaints)) from error


def allowed_values(field: FieldInfo) -> str:
    """What a key accepts, in words: '4, 8, 16', 'an integer from 0 to 16'."""
    limits = {type(limit): limit for limit in field.metadata}
    low, high = limits.get(annotated_types.Ge), limits.get(annotated_types.Le)
    if low is not None and high is not None:
        return f"{_in_words(field.annotation)} from {low.ge} to {high.le}"
    return _in_words(field.annotation)


def _in_words(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(str(value) for value in get_args(annotation))
    if isinstance(annotation, types.UnionType):
        return " or ".join(_in_words(part) for part in get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a mapping with the keys {', '.join(annotation.model_fields)}"
    words = {int: "an integer", str: "a text", bool: "true or false", types.NoneType: "nothing"}
    return words.get(annotation, str(annotation))


def _complaint(model: type[BaseModel], problem: Any) -> str:
    """One pydantic error as 'key k.bits: got 5, allowed 4, 8, 16'."""
    location = problem["loc"]
    if not location:
        return str(problem["msg"])
    owner = _owner(model, location[:-1])
    fields = {field.alias or name: field for name, field in owner.model_fields.items()} if owner else {}
    name = ".".join(str(part) for part in location)
    if problem["type"] == "extra_forbidden":
        return f"unknown key {name} (got {problem['input']!r}); allowed keys: {', '.join(fields)}"
    field = fields.get(location[-1])
    allowed = allowed_values(field) if field else str(problem["msg"])
    if problem["type"] == "missing":
        return f"missing key {name}; allowed {allowed}"
    reason = f" ({problem['msg']})" if problem["type"] == "string_pattern_mismatch" else ""
    return f"key {name}: got {problem['input']!r}, allowed {allowed}{reason}"


def _owner(model: type[BaseModel], path: tuple[str | int, ...]) -> type[BaseModel] | None:
    """The model that the keys and list positions of `path` lead to; None when it is no model."""
    annotation: Any = model
    for part in path:
        if isinstance(part, int):
            annotation = (*get_args(annotation), None)[0]
        elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
            annotation = annotation.model_fields[part].annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice (plain YAML keeps the last one, silently)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        repeated = sorted({str(key) for key in keys if keys.count(key) > 1})
        if repeated:
            problem = f"key given twice: {', '.join(repeated)}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)
