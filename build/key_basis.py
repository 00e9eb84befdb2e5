"""The balanced basis of each layer's K for an engine (`nibble.balance`), made from calibration prompts and kept.

    engines/<model>/calibration/key_basis.safetensors   layers.{i}.{forward,reader}; metadata: what it was made from

One pass over a few windows; the file serves every KV recipe of the model.
"""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from build.real_pages import LayerPages
from nibble import atomic
from nibble.balance import RIDGE, BasisChange
from nibble.formats import KVFormat, ScaleKind
from nibble.hashing import files_sha256, json_sha256
from nibble.key_transform import KEYS_FILE, KeyTransform
from nibble.models import device_options, hash_source, load_model, load_tokenizer, read_shape
from nibble.paths import calibration_dir
from nibble.recipes import ModelRecipe

BASIS_FILE = "key_basis.safetensors"
BASIS_REASON = f"K is stored in a balanced basis ({KEYS_FILE}), which Q is multiplied into after RoPE"
WINDOWS = 6
PROMPTS_DRAWN = 200
ENOUGH_TOKENS = 512  # windows shorter than this say too little of a page's spread


def wants_basis(fmt: KVFormat) -> bool:
    """True for formats whose K is coarse enough to gain: 4 bits with a scale for each channel of a page."""
    return fmt.k.bits == 4 and fmt.k.scale is ScaleKind.PAGE_CHANNEL


def find_key_transforms(
    source: Path, recipe: ModelRecipe, formats: list[KVFormat], console: Console
) -> dict[int, KeyTransform]:
    """The transform of each layer that wants one; {} for models whose context is too short to tell."""
    shape = read_shape(source)
    if not any(map(wants_basis, formats)) or shape.max_positions < ENOUGH_TOKENS:
        return {}
    bases = _find_bases(source, recipe, console)
    return {layer: KeyTransform(bases[layer]) for layer, fmt in enumerate(formats) if wants_basis(fmt)}


def stored_pages(pages: LayerPages, transform: KeyTransform | None) -> LayerPages:
    """Pages as the cache holds them: K in the basis."""
    if transform is None:
        return pages
    tokens = pages.k.transpose(1, 2).flatten(0, 1)  # [pages * 64, heads, channels]
    k = transform.store(tokens).unflatten(0, (len(pages.k), -1)).transpose(1, 2).half()
    return LayerPages(k, pages.v)


def _find_bases(source: Path, recipe: ModelRecipe, console: Console) -> list[BasisChange]:
    from calibrate.run import SHIPPED_PROMPTS

    path = calibration_dir(recipe.name) / BASIS_FILE
    made_of = [hash_source(source).weights_sha256, files_sha256([SHIPPED_PROMPTS]), recipe.dtype, RIDGE, WINDOWS]
    identity = json_sha256(made_of)
    with atomic.exclusive(path, console.print):
        found = _read(path, identity)
        if found is None:
            found = _make(source, recipe, SHIPPED_PROMPTS, console)
            tensors = {f"layers.{i}.{n}": getattr(b, n) for i, b in enumerate(found) for n in ("forward", "reader")}
            atomic.write_bytes(path, save(tensors, metadata={"identity": identity}))
    return found


def _make(source: Path, recipe: ModelRecipe, prompts: Path, console: Console) -> list[BasisChange]:
    from calibrate.key_moments import WINDOW_TOKENS, balance_keys
    from calibrate.prompt_set import encode_prompts, load_prompt_set

    shape = read_shape(source)
    length = min(WINDOW_TOKENS, shape.max_positions)
    drawn = load_prompt_set(str(prompts)).draw(PROMPTS_DRAWN, 0)
    tokens = [token for ids in encode_prompts(drawn, load_tokenizer(source), length) for token in ids]
    windows = torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)[:WINDOWS]
    with console.status(f"balancing K: {windows.numel()} tokens of calibration prompts"):
        model = load_model(source, recipe.dtype, **device_options())
        return balance_keys(model, windows, min(shape.max_positions, recipe.max_context))


def _read(path: Path, identity: str) -> list[BasisChange] | None:
    """The bases that are there, when they are whole and of that identity."""
    try:
        with safe_open(path, framework="pt") as stream:
            if stream.metadata()["identity"] != identity:
                return None
            count = len(list(stream.keys())) // 2
            names = [(f"layers.{i}.forward", f"layers.{i}.reader") for i in range(count)]
            return [BasisChange(stream.get_tensor(forward), stream.get_tensor(reader)) for forward, reader in names]
    except (OSError, SafetensorError, KeyError, TypeError):
        return None
