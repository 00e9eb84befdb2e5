"""Trains the needle model: a small Llama that finds any of thousands of needles in 32,768 tokens.

    python -m bench.needle_train FOLDER                    from two heads put in by hand; one GPU, half a minute
    python -m bench.needle_train FOLDER --untrained        those two heads as they are: exact too, on any machine
    python -m bench.needle_train FOLDER --start random     from random weights; a minute, and not as good so far

The loss is on answers, hundreds of questions a sequence, and a third as much on all other tokens, so that the whole
distribution is the model's own and not what was left over where nothing was asked. From random weights two heads are
also told where to look (bench.needle_guide), without which a minute is not enough, and half of the channels turn
quickly with the position while half stand still (RoPE scaled as in Llama 3): these match keys at any distance, the
quick ones find neighbours. From bench.needle_start's heads neither is needed. Sequences grow to 32,768 tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from bench.measured_commit import measured_commit
from bench.needle_batches import Batch, drill_batch, random_batch, write_tokenizer
from bench.needle_guide import GUIDED, Guide
from bench.needle_start import wire
from eval.needle_words import Language
from nibble.hashing import file_sha256

RECIPE_FILE = "training.json"
PROMPTS = (64, 1024)  # that a calibration draws from, and tokens of each
HALF_STILL = {
    "rope_type": "llama3", "rope_theta": 30.0, "factor": 1e8, "original_max_position_embeddings": 35,
    "low_freq_factor": 1.0, "high_freq_factor": 1.05,
}  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """`steps` of `sequences` x `tokens`, while the learning rate falls to a tenth.

    needles: fewest and most of a plain lesson, drawn for every step; None for needles and questions mixed.
    """

    tokens: int
    sequences: int
    steps: int
    learning_rate: float
    needles: tuple[int, int] | None = None

    def batch(self, language: Language, step: int, device: str, generator: torch.Generator) -> Batch:
        """New text, [sequences, tokens]."""
        if self.needles is None:
            return random_batch(language, self.sequences, self.tokens, device, generator)
        low, high = self.needles
        needles = round(low * (high / low) ** random.Random(step).random())  # as often few as many
        return drill_batch(language, self.sequences, self.tokens, needles, device, generator)


@dataclass(frozen=True)
class Recipe:
    """A model, its language and its curriculum.

    neighbour, match: weights of the guide's losses. other_tokens: of the loss on all that is no answer; the answers'
    is 1.
    """

    language: Language
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: dict[str, Any]
    max_tokens: int
    stages: tuple[Stage, ...]
    neighbour: float = 1.0
    match: float = 1.0
    other_tokens: float = 0.0
    wired: bool = False
    seed: int = 0


FULL = Recipe(
    Language(), layers=2, hidden=256, heads=4, kv_heads=2, head_dim=128, rope=HALF_STILL, max_tokens=32768,
    stages=(
        Stage(96, 512, 200, 2e-3, needles=(16, 16)),
        Stage(768, 64, 250, 2e-3, needles=(128, 128)),
        Stage(2048, 32, 250, 1e-3),
        Stage(8192, 8, 300, 1e-3, needles=(32, 1300)),
        Stage(32768, 2, 300, 5e-4, needles=(88, 4096)),
    ),
)  # fmt: skip
WIRED = replace(
    FULL, head_dim=64, rope={"rope_type": "default", "rope_theta": 1e13}, wired=True, neighbour=0.0, match=0.0,
    other_tokens=0.3,
    stages=(
        Stage(256, 256, 150, 1e-3), Stage(2048, 32, 100, 5e-4), Stage(8192, 8, 80, 3e-4), Stage(32768, 2, 150, 2e-4),
    ),
)  # fmt: skip
RECIPES = {"random": FULL, "wired": WIRED}


def make_model(recipe: Recipe) -> LlamaForCausalLM:
    """The model that training starts from, fp32: random weights, or two heads put in by hand."""
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=recipe.language.size,
        hidden_size=recipe.hidden,
        intermediate_size=2 * recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_tokens,
        rope_parameters=dict(recipe.rope),
        tie_word_embeddings=not recipe.wired,
        initializer_range=0.02 if recipe.wired else recipe.hidden**-0.5,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    if recipe.wired:
        wire(model, recipe.language)
    return model


def train(recipe: Recipe, device: str) -> tuple[LlamaForCausalLM, list[dict[str, float]]]:
    """Run the curriculum; returns the model and what each stage came to."""
    model = make_model(recipe).to(device)
    model.set_attn_implementation(GUIDED)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01, fused=device == "cuda"
    )
    generator = torch.Generator(device).manual_seed(recipe.seed + 1)
    log = []
    for stage in recipe.stages:
        log.append(run_stage(model, optimizer, recipe, stage, generator))
        print(json.dumps(log[-1]), flush=True)
    return model, log


def run_stage(
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    stage: Stage,
    generator: torch.Generator,
) -> dict[str, float]:
    """Train at one length; returns steps, and loss, share of right answers and guide's loss over the last fifty."""
    device = model.device.type
    start = time.monotonic()
    recent: deque[torch.Tensor] = deque(maxlen=50)
    for step in range(stage.steps):
        for group in optimizer.param_groups:
            group["lr"] = stage.learning_rate * min(1.0, (step + 1) / 50) * (1 - 0.9 * step / stage.steps)
        batch = stage.batch(recipe.language, step, device, generator)
        guide = Guide(batch, recipe.neighbour, recipe.match)
        loss, right, others = losses(model, batch, guide)
        guided = torch.as_tensor(guide.loss(), device=loss.device)
        optimizer.zero_grad(set_to_none=True)
        (loss + recipe.other_tokens * others + guided).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent.append(torch.stack((loss.detach(), right, others.detach(), guided.detach())))
        if step % 100 == 99:
            print(f"{stage.tokens} step {step + 1}: {_means(recent)}", flush=True)
    seconds = round(time.monotonic() - start, 1)
    return {"tokens": stage.tokens, "steps": stage.steps, "seconds": seconds, **_means(recent)}


def _means(recent: deque[torch.Tensor]) -> dict[str, float]:
    means = torch.stack(list(recent)).mean(0).tolist()
    return {name: round(value, 4) for name, value in zip(("loss", "right", "others", "guide"), means, strict=True)}


def losses(model: LlamaForCausalLM, batch: Batch, guide: Guide | None = None) -> tuple[torch.Tensor, ...]:
    """Cross entropy over answer tokens, the share of them that is right, and cross entropy over all other tokens."""
    tokens, answers = batch.tokens, batch.is_answer[:, 1:]
    device = tokens.device.type
    options = {} if guide is None else {"guide": guide}
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        hidden = model.model(tokens[:, :-1], use_cache=False, **options).last_hidden_state
        logits, others = model.lm_head(hidden[answers]), model.lm_head(hidden[~answers])
    targets = tokens[:, 1:][answers]
    right = (logits.argmax(-1) == targets).float().mean()
    return cross_entropy(logits.float(), targets), right, cross_entropy(others.float(), tokens[:, 1:][~answers])


def save(model: LlamaForCausalLM, recipe: Recipe, log: list[dict[str, float]], folder: Path) -> None:
    """Weights in fp16, tokenizer, prompts to calibrate on, and how they were made."""
    device = torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu"
    model.half().save_pretrained(folder)
    write_tokenizer(recipe.language, folder)
    text = random_batch(recipe.language, *PROMPTS, "cpu", torch.Generator().manual_seed(recipe.seed + 2)).tokens
    prompts = (json.dumps({"text": recipe.language.text(row)}) + "\n" for row in text.tolist())
    (folder / "prompts.jsonl").write_text("".join(prompts), encoding="utf-8")
    weights = file_sha256(folder / "model.safetensors")
    about = {"device": device, "torch": torch.__version__, "commit": measured_commit(), "weights_sha256": weights}
    record = {"recipe": asdict(recipe), "log": log, **about}
    (folder / RECIPE_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Train and save; the last line of stdout is the log as JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.needle_train", description="Train the needle model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--start", choices=RECIPES, default="wired", help="weights that training starts from")
    parser.add_argument("--untrained", action="store_true", help="write the model whose heads are put in by hand")
    parser.add_argument("--other-tokens", type=float, help="weight of the loss on all that is no answer")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of the text")
    options = parser.parse_args()
    recipe = replace(RECIPES[options.start], seed=options.seed)
    if options.other_tokens is not None:
        recipe = replace(recipe, other_tokens=options.other_tokens)
    if options.untrained:
        recipe = replace(recipe, stages=())
    torch.set_float32_matmul_precision("high")
    model, log = train(recipe, "cuda" if torch.cuda.is_available() else "cpu")
    save(model, recipe, log, options.folder)
    print(json.dumps(log))


if __name__ == "__main__":
    main()
