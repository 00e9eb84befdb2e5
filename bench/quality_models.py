"""The models that the quality bench knows, with their texts as token ids.

smollm2-135m comes from its recipe. `pack:<folder>` is the same model as `bench.quality_pack` wrote it, small enough to
carry to a machine without packages. Tiny models are made in `bench.quality_tiny`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from nibble.paths import REPOSITORY_ROOT

CALIBRATION_TOKENS = 1024
PROMPTS = REPOSITORY_ROOT / "calibrate" / "prompts" / "prompts.jsonl"


@dataclass(frozen=True)
class Subject:
    """A model and its texts. texts: token ids, one long row for each of "eval" and "calibration"."""

    name: str
    model: PreTrainedModel
    texts: dict[str, torch.Tensor]
    bos: int | None = None

    @property
    def num_layers(self) -> int:
        return int(self.model.config.num_hidden_layers)

    @property
    def num_kv_heads(self) -> int:
        return int(self.model.config.num_key_value_heads)

    @property
    def head_dim(self) -> int:
        config = self.model.config
        return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    @property
    def positions(self) -> int:
        return int(self.model.config.max_position_embeddings)

    def calibration(self, count: int) -> torch.Tensor:
        """Token ids [count, 1024] of the calibration prompts."""
        return self._cut("calibration", count, CALIBRATION_TOKENS)

    def windows(self, text: str, count: int, tokens: int) -> torch.Tensor:
        """Token ids [count, tokens + 1], spread over the text; of calibration text, none that `calibration` takes."""
        return self._cut(text, count, tokens + 1, spread=True)

    def _cut(self, text: str, count: int, length: int, spread: bool = False) -> torch.Tensor:
        row = self.texts[text]
        body = length - (self.bos is not None)
        first = len(row) // 3 if spread and text == "calibration" else 0
        step = max(body, (len(row) - first - body) // count) if spread else body
        starts = [first + step * index for index in range(count)]
        windows = torch.stack([row[start : start + body] for start in starts])
        if self.bos is None:
            return windows
        return torch.cat((torch.full((count, 1), self.bos), windows), 1)


def load_subject(name: str, device: str) -> Subject:
    """The subject of a name. NibbleError lists the names."""
    if name.startswith("pack:"):
        from bench.quality_pack import unpack

        return unpack(Path(name.removeprefix("pack:")), device)
    if name.startswith("tiny-"):
        from bench.quality_tiny import make_tiny

        return make_tiny(name, device)
    from calibrate.search_text import starting_tokens
    from nibble.models import load_model, load_tokenizer, resolve_source
    from nibble.recipes import load_model_recipe

    source = resolve_source(load_model_recipe(name))
    tokenizer = load_tokenizer(source)

    def encode(text: str) -> torch.Tensor:
        return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    texts = {which: encode(text) for which, text in read_texts().items()}
    start = starting_tokens(tokenizer)
    return Subject(name, load_model(source, "float32").to(device), texts, start[0] if start else None)


def read_texts() -> dict[str, str]:
    """The evaluation text (two novels), and the calibration prompts in a fixed random order."""
    import json

    novels = sorted((REPOSITORY_ROOT / "eval" / "data").glob("*.txt"))
    prompts = [json.loads(line)["text"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    random.Random(0).shuffle(prompts)
    joined = "\n\n".join(prompts)
    return {"eval": "".join(path.read_text(encoding="utf-8") for path in novels), "calibration": joined}
