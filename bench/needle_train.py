"""Trains the needle model: a small Llama that finds any of thousands of needles in 32,768 tokens.

    python -m bench.needle_train bench/needle_model                on one GPU, half a minute
    python -m bench.needle_train FOLDER --untrained                where it starts from: exact already, on any machine

Training starts from two heads that retrieve (bench.needle_start), for found by chance they are a matter of luck and of
many minutes. The loss is on answers alone, a sequence asks hundreds of questions, and sequences grow from 256 to 32,768
tokens. RoPE turns so slowly (theta) that half of the channels stand still over 32k tokens: they match keys, the quick
ones find neighbours.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from bench.needle_language import Language, random_batch, write_tokenizer
from bench.needle_start import wire

RECIPE_FILE = "training.json"


@dataclass(frozen=True)
class Stage:
    """Steps of `sequences` x `tokens` for `seconds`, while the learning rate falls to a tenth."""

    tokens: int
    sequences: int
    seconds: float
    learning_rate: float


@dataclass(frozen=True)
class Recipe:
    """A model, its language and its curriculum."""

    language: Language
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    rope_theta: float
    max_tokens: int
    stages: tuple[Stage, ...]
    seed: int = 0


FULL = Recipe(
    Language(), layers=2, hidden=256, heads=4, kv_heads=2, rope_theta=1e13, max_tokens=32768,
    stages=(
        Stage(256, 256, 6, 3e-4),
        Stage(2048, 32, 6, 3e-4),
        Stage(8192, 8, 6, 3e-4),
        Stage(32768, 2, 10, 3e-4),
    ),
)  # fmt: skip


def make_model(recipe: Recipe) -> LlamaForCausalLM:
    """The model that training starts from, fp32."""
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=recipe.language.size,
        hidden_size=recipe.hidden,
        intermediate_size=2 * recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=64,
        max_position_embeddings=recipe.max_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    wire(model, recipe.language)
    return model


def train(recipe: Recipe, device: str) -> tuple[LlamaForCausalLM, list[dict[str, float]]]:
    """Run the curriculum; returns the model and what each stage came to."""
    model = make_model(recipe).to(device)
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
    """Train at one length; returns steps, and loss and share of right answers over the last fifty."""
    device = model.device.type
    start, step = time.monotonic(), 0
    recent: deque[torch.Tensor] = deque(maxlen=50)
    while (spent := time.monotonic() - start) < stage.seconds:
        for group in optimizer.param_groups:
            group["lr"] = stage.learning_rate * min(1.0, (step + 1) / 50) * (1 - 0.9 * spent / stage.seconds)
        batch = random_batch(recipe.language, stage.sequences, stage.tokens, device, generator)
        loss, right = answer_loss(model, batch.tokens, batch.is_answer)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent.append(torch.stack((loss.detach(), right)))
        step += 1
        if step % 100 == 0:
            mean = torch.stack(list(recent)).mean(0).tolist()
            print(f"{stage.tokens} step {step} {spent:.0f} s: loss {mean[0]:.4f}, right {mean[1]:.4f}", flush=True)
    mean = torch.stack(list(recent)).mean(0).tolist()
    seconds = round(time.monotonic() - start, 1)
    return {"tokens": stage.tokens, "steps": step, "seconds": seconds, "loss": mean[0], "right": mean[1]}


def answer_loss(
    model: LlamaForCausalLM, tokens: torch.Tensor, is_answer: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy over answer tokens, and the share of them that is right."""
    device = tokens.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        hidden = model.model(tokens[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[is_answer[:, 1:]])
    targets = tokens[:, 1:][is_answer[:, 1:]]
    return cross_entropy(logits.float(), targets), (logits.argmax(-1) == targets).float().mean()


def main() -> None:
    """Train and save; the last line of stdout is the log as JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.needle_train", description="Train the needle model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--untrained", action="store_true", help="write the model that training starts from")
    options = parser.parse_args()
    recipe = replace(FULL, stages=()) if options.untrained else FULL
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    model, log = train(recipe, device)
    model.to(torch.bfloat16).save_pretrained(options.folder)
    write_tokenizer(recipe.language, options.folder)
    record = {
        "recipe": asdict(recipe),
        "log": log,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
    }
    (options.folder / RECIPE_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(log))


if __name__ == "__main__":
    main()
