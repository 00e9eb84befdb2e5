"""Models of full size without a download: a config and a tokenizer, and weights that are made when it is loaded.

    make engine MODEL=llama-8b KV=int4 WEIGHTS=dummy        model dummy:llama-8b, in engines/llama-8b-dummy/

For speed and memory alone: the weights are random (`nibble.runtime.weight_sources.DummyWeights`), so are the answers,
and such an engine can't be certified. The config is that of recipes/models/configs, or of the folder that stands behind
`dummy:`. Its key `nibble_dummy_seed` marks the folder and is hashed with it. One token a byte, whatever the model's own
tokenizer is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nibble import atomic
from nibble.errors import NibbleError
from nibble.paths import RECIPES_DIR, source_dir

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

CONFIGS = RECIPES_DIR / "models" / "configs"
SEED_KEY = "nibble_dummy_seed"
SEED = 0
BYTES = 256
CHAT = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "


def make_dummy_source(model: str, name: str) -> Path:
    """The folder engines/<name>/source/ of a dummy of `model`, written when it differs. NibbleError: no config."""
    config = {**_find_config(model), SEED_KEY: SEED}
    if config["vocab_size"] < BYTES:
        raise NibbleError(f"model dummy:{model}: got a vocabulary of {config['vocab_size']}, allowed {BYTES} or more")
    target, text = source_dir(name), json.dumps(config, indent=2) + "\n"
    with atomic.exclusive(target):
        path = target / "config.json"
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            with atomic.new_directory(target) as workspace:
                (workspace / "config.json").write_text(text, encoding="utf-8")
                _write_byte_tokenizer(workspace)
    return target


def dummy_seed(config: dict[str, Any]) -> int | None:
    """The seed of a folder's weights, from its config.json; None for a folder with weights of its own."""
    seed = config.get(SEED_KEY)
    return None if seed is None else int(seed)


def make_dummy_model(config: PretrainedConfig, seed: int, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """transformers' model with the dummy weights of `seed`."""
    import torch
    from transformers import AutoModelForCausalLM

    from nibble.runtime.weight_sources import DummyWeights

    weights = DummyWeights(config, seed)
    with torch.device(device), torch.no_grad():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for name, parameter in model.named_parameters():
            weights.read(name, parameter)
    return model


def _find_config(model: str) -> dict[str, Any]:
    shipped, own = CONFIGS / f"{model}.json", Path(model).expanduser() / "config.json"
    path = shipped if shipped.is_file() else own
    if not path.is_file():
        names = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.json")))
        raise NibbleError(
            f"WEIGHTS=dummy: got model {model!r}, whose config.json is not shipped; allowed {names}, or a folder "
            "with a config.json"
        )
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _write_byte_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings) + "\n", encoding="utf-8")
