"""In which basis an engine stores K and V (`nibble.balance`), and static scales that fit it.

    engines/<model>/calibration/kv_moments.safetensors   layers.{i}.{moment}; metadata: what they were made from

One pass over a few windows of calibration prompts gives the moments; the file serves every KV recipe of the model.
Static scales of 4 bits span `STATIC_SPAN` standard deviations to each side of the mean: in the balanced basis values
are close to normal, and a step too wide for all of them costs more than the few that are cut off.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from build.real_pages import LayerPages
from nibble import atomic
from nibble.formats import KVFormat, ScaleKind, TensorFormat
from nibble.hashing import files_sha256, json_sha256
from nibble.key_transform import KEYS_FILE, KeyTransform
from nibble.models import device_options, hash_source, load_model, load_tokenizer, read_shape
from nibble.paths import calibration_dir
from nibble.recipes import ModelRecipe
from nibble.rotation import hadamard_matrix, rotate
from nibble.static_scales import check_scales

if TYPE_CHECKING:
    from calibrate.key_moments import LayerMoments
    from nibble.balance import BasisChange

MOMENTS_FILE = "kv_moments.safetensors"
MOMENTS_VERSION = 1  # raise it when what is collected changes
BASIS_REASON = f"K is stored in a balanced basis ({KEYS_FILE}), which Q is multiplied into after RoPE"
WINDOWS = 6
PROMPTS_DRAWN = 200
ENOUGH_TOKENS = 512  # windows shorter than this say too little of a page's spread
STATIC_SPAN = 2.75
LARGEST_SCORE_ERROR = 1e-3  # of fp16 pages in a basis; several times what fp16 costs by itself


@dataclass
class KeyPlan:
    """The transform of each layer that has one, and why a layer has it, or has none although its format wants one."""

    transforms: dict[int, KeyTransform] = field(default_factory=dict)
    why: dict[int, str] = field(default_factory=dict)


def wants_basis(fmt: KVFormat) -> bool:
    """True for formats whose K is coarse enough to gain: 4 bits, scales for each channel."""
    return fmt.k.bits == 4 and fmt.k.scale in (ScaleKind.PAGE_CHANNEL, ScaleKind.STATIC_CHANNEL)


def find_key_transforms(source: Path, recipe: ModelRecipe, formats: list[KVFormat], console: Console) -> KeyPlan:
    """The transform of each layer that wants one; none for models whose context is too short to tell.

    A layer has none either when fp16 pages in the basis would do more to its scores than pages of K as it is, beyond
    `LARGEST_SCORE_ERROR`. Raises NibbleError naming the layer whose moments are not usable.
    """
    from calibrate.key_moments import layer_basis

    plan = KeyPlan()
    moments = find_moments(source, recipe, console) if any(map(wants_basis, formats)) else None
    if moments is None:
        return plan
    for layer, fmt in enumerate(formats):
        if wants_basis(fmt):
            basis = layer_basis(layer, moments[layer], fmt.k.scale is ScaleKind.STATIC_CHANNEL)
            refusal = refuse_basis(moments[layer], basis)
            if refusal is None:
                plan.transforms[layer] = KeyTransform(basis, rotate_value=_is_static4(fmt.v) and not fmt.v.rotated)
            else:
                console.print(f"layer {layer}: {refusal}")
            plan.why[layer] = refusal or BASIS_REASON
    return plan


def refuse_basis(moments: LayerMoments, basis: BasisChange) -> str | None:
    """Why a layer is better off without its basis; None when it is not."""
    error, plain = moments.score_error(basis), moments.score_error(None)
    if error <= max(LARGEST_SCORE_ERROR, plain):
        return None
    return (
        f"no balanced basis: in it fp16 pages would change scores by {error:.2g} of their size, K as it is by "
        f"{plain:.2g}; allowed {LARGEST_SCORE_ERROR:g}"
    )


def static_scales_in_basis(
    source: Path, recipe: ModelRecipe, formats: list[KVFormat], transforms: dict[int, KeyTransform], console: Console
) -> dict[str, torch.Tensor]:
    """Entries of kv_static.safetensors that replace those from calibrated ranges: 4-bit layers in a new basis."""
    tensors: dict[str, torch.Tensor] = {}
    static = [layer for layer, fmt in enumerate(formats) if _is_static4(fmt.k) or _is_static4(fmt.v)]
    moments = find_moments(source, recipe, console) if set(static) & set(transforms) else None
    for layer in static:
        transform = transforms.get(layer, KeyTransform())
        if transform.basis is None or moments is None:
            continue
        rotation = hadamard_matrix(transform.basis.forward.shape[-1])
        changes = {"k": transform.basis.forward.double(), "v": rotation}
        for tensor, change in changes.items():
            fmt = getattr(formats[layer], tensor)
            if _is_static4(fmt) and (tensor == "k" or transform.rotate_value):
                mean, covariance = moments[layer].spread(tensor)
                centre = (change @ mean.unsqueeze(-1)).squeeze(-1)
                deviation = (change @ covariance @ change.mT).diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
                scale = (2 * STATIC_SPAN / fmt.levels * deviation).float().contiguous()
                zero = (centre - STATIC_SPAN * deviation).float().contiguous()
                check_scales(scale, zero, f"layer {layer} {tensor.upper()}")
                tensors[f"layers.{layer}.{tensor}.scale"], tensors[f"layers.{layer}.{tensor}.zero"] = scale, zero
    return tensors


def stored_pages(pages: LayerPages, transform: KeyTransform | None) -> LayerPages:
    """Pages as the cache holds them."""
    if transform is None:
        return pages
    tokens = pages.k.transpose(1, 2).flatten(0, 1)  # [pages * 64, heads, channels]
    k = transform.store(tokens).unflatten(0, (len(pages.k), -1)).transpose(1, 2).half()
    return LayerPages(k, rotate(pages.v.float()).half() if transform.rotate_value else pages.v)


def _is_static4(fmt: TensorFormat) -> bool:
    return fmt.bits == 4 and fmt.scale is ScaleKind.STATIC_CHANNEL


def find_moments(source: Path, recipe: ModelRecipe, console: Console) -> list[LayerMoments] | None:
    """The moments of each layer, collected now when they are not there; None for models whose context is too short."""
    from calibrate.run import default_prompts

    if read_shape(source).max_positions < ENOUGH_TOKENS:
        return None
    path, prompts = calibration_dir(recipe.name) / MOMENTS_FILE, default_prompts(source)
    made_of = [hash_source(source).weights_sha256, files_sha256([prompts]), recipe.dtype, recipe.max_context]
    identity = json_sha256([*made_of, WINDOWS, MOMENTS_VERSION])
    with atomic.exclusive(path, console.print):
        found = _read(path, identity)
        if found is None:
            found = _collect(source, recipe, prompts, console)
            tensors = {
                f"layers.{index}.{field.name}": getattr(layer, field.name).float().contiguous()
                for index, layer in enumerate(found)
                for field in fields(layer)
            }
            atomic.write_bytes(path, save(tensors, metadata={"identity": identity}))
            found = _read(path, identity) or found  # what later builds will see, rounded to float32
    return found


def _collect(source: Path, recipe: ModelRecipe, prompts: Path, console: Console) -> list[LayerMoments]:
    from calibrate.key_moments import WINDOW_TOKENS, collect_moments
    from calibrate.prompt_set import encode_prompts, load_prompt_set

    shape = read_shape(source)
    length = min(WINDOW_TOKENS, shape.max_positions)
    prompt_set = load_prompt_set(str(prompts))
    drawn = prompt_set.draw(min(PROMPTS_DRAWN, len(prompt_set.prompts)), 0)
    tokens = [token for ids in encode_prompts(drawn, load_tokenizer(source), length) for token in ids]
    windows = torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)[:WINDOWS]
    with console.status(f"balancing K: {windows.numel()} tokens of calibration prompts"):
        model = load_model(source, recipe.dtype, **device_options())
        return collect_moments(model, windows, min(shape.max_positions, recipe.max_context))


def _read(path: Path, identity: str) -> list[LayerMoments] | None:
    """The moments that are there, when they are whole and of that identity."""
    from calibrate.key_moments import LayerMoments

    names = [field.name for field in fields(LayerMoments)]
    try:
        with safe_open(path, framework="pt") as stream:
            if stream.metadata()["identity"] != identity:
                return None
            count = len(list(stream.keys())) // len(names)
            return [
                LayerMoments(*(stream.get_tensor(f"layers.{index}.{name}").double() for name in names))
                for index in range(count)
            ]
    except (OSError, SafetensorError, KeyError, TypeError):
        return None
