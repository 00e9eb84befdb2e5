"""Recall of the needle model by cache format, length and depth: bench/results/needle.json.

    python -m bench.needle FOLDER        a model of bench.needle_train; one GPU, a minute

Three haystacks, by RULER's kinds: `single`, needles that are asked for and filler between them; `multikey`, half of
the rest are needles that nobody asks for; `multivalue`, keys with four values in different places. Questions come last,
one after the other. A value is recalled when it is the most likely answer, or, of four values, among the four most
likely. Text, needles and questions are the same for every format; a cell counts where fp16 recalls nine in ten.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from bench.measured_commit import measured_commit
from bench.needle_batches import random_batch
from eval.needle_words import DEPTHS, VALUES_OF_KEY, VARIANTS, Haystack, Language, make_haystack
from nibble.fake_cache import ROWS_AT_ONCE, TwoForms, attend, fake_cache_attention, sealed_view
from nibble.formats import FORMATS, KVFormat, ScaleKind, TensorFormat
from nibble.hashing import file_sha256
from nibble.quantizer import static_parameters
from nibble.reference import LayerScales
from nibble.runtime.cache import CacheSpec
from nibble.visibility import PagePolicy

LENGTHS = {1024: 6, 4096: 4, 16384: 3, 32768: 2}  # tokens: haystacks of each variant
SCORED_FROM = 0.9  # recall of fp16 in a cell
CALIBRATION = 8  # windows of 1,024 tokens that static ranges come from
ATTENTION = "nibble-needle"


class Needles:
    """The model, and static ranges of its K and V from calibration text at positions up to the longest."""

    def __init__(self, model: PreTrainedModel, language: Language) -> None:
        model.set_attn_implementation(ATTENTION)
        self.language, self.model = language, model
        config = model.config
        self.shape = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
        self.ranges: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._calibrate()

    @torch.inference_mode()
    def _calibrate(self) -> None:
        generator = torch.Generator(self.model.device).manual_seed(7)
        text = random_batch(self.language, CALIBRATION, 1024, self.model.device, generator).tokens
        longest = int(self.model.config.max_position_embeddings)
        for number, row in enumerate(text):
            offset = (longest - len(row)) * number // (CALIBRATION - 1)
            positions = offset + torch.arange(len(row), device=row.device)
            self._run(row, self.spec(FORMATS["fp16"]), position_ids=positions[None], observe=self._observe)

    def _observe(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        new = [x.float().aminmax(dim=1, keepdim=True) for x in (k, v)]
        old = self.ranges.get(layer, [tuple(each) for each in new])
        self.ranges[layer] = [
            (low.minimum(n.min), high.maximum(n.max)) for (low, high), n in zip(old, new, strict=True)
        ]

    def spec(self, fmt: KVFormat, policy: PagePolicy | None = None) -> CacheSpec:
        """The cache of a format in every layer."""
        layers, heads, size = self.shape
        scales = {}
        if fmt.needs_calibration:
            for layer, (k, v) in self.ranges.items():
                scales[layer] = LayerScales(static_parameters(*k, fmt.k), static_parameters(*v, fmt.v))
        return CacheSpec((fmt,) * layers, heads, size, policy or PagePolicy(), scales)

    @torch.inference_mode()
    def recalled(self, haystack: Haystack, spec: CacheSpec) -> Iterator[tuple[int, bool]]:
        """For every needle asked for, its depth and whether it is recalled through the cache."""
        tokens = torch.tensor(haystack.tokens, device=self.model.device)
        hidden = self._run(tokens, spec, asked_from=haystack.questions[0].place - 1)
        places = torch.tensor([question.place for question in haystack.questions], device=tokens.device)
        likely = self.model.lm_head(hidden[places - 1]).topk(VALUES_OF_KEY).indices.tolist()
        for question, said in zip(haystack.questions, likely, strict=True):
            for value, depth in question.values:
                yield depth, value in said[: len(question.values)]

    def _run(self, tokens: torch.Tensor, spec: CacheSpec, **options: Any) -> torch.Tensor:
        """The last hidden states [tokens, hidden]."""
        return self.model.model(tokens[None], use_cache=False, fake_cache=spec, **options).last_hidden_state[0]

    def records(self, name: str, spec: CacheSpec, lengths: dict[int, int]) -> Iterator[dict[str, Any]]:
        """One record for every length, variant and depth."""
        for tokens, count in lengths.items():
            for variant in VARIANTS:
                right: Counter[int] = Counter()
                asked: Counter[int] = Counter()
                for seed in range(count):
                    for depth, is_right in self.recalled(make_haystack(self.language, variant, tokens, seed), spec):
                        asked[depth] += 1
                        right[depth] += is_right
                for depth in DEPTHS:
                    yield {
                        "format": name, "variant": variant, "length": tokens,
                        "depth": depth, "recall": round(right[depth] / asked[depth], 4), "trials": asked[depth],
                    }  # fmt: skip


def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Recall of each format over the cells that fp16 passes, by variant, and the same at the longest length."""
    cell = ("variant", "length", "depth")
    fp16 = {tuple(r[key] for key in cell): r["recall"] for r in records if r["format"] == "fp16"}
    if not fp16:
        return []
    rows = []
    for name in dict.fromkeys(record["format"] for record in records):
        row: dict[str, Any] = {"format": name}
        for variant in VARIANTS:
            scored = [
                r for r in records
                if r["format"] == name and r["variant"] == variant and fp16[tuple(r[k] for k in cell)] >= SCORED_FROM
            ]  # fmt: skip
            row[variant] = _recall(scored)
            row[f"{variant} at the longest"] = _recall([r for r in scored if r["length"] == max(LENGTHS)])
        rows.append(row)
    return rows


def _recall(records: list[dict[str, Any]]) -> float | None:
    trials = sum(record["trials"] for record in records)
    return round(sum(record["recall"] * record["trials"] for record in records) / trials, 4) if trials else None


def needle_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    fake_cache: CacheSpec | None = None,
    asked_from: int = 0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """`fake_cache_attention`, but for the last layer, which only answers from position `asked_from` on."""
    assert fake_cache is not None  # Needles passes it
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if layer + 1 < len(fake_cache.formats) or not asked_from:
        return fake_cache_attention(module, query, key, value, attention_mask, scaling, fake_cache, **options)
    k_far, v_far = sealed_view(key[0], value[0], fake_cache.formats[layer], fake_cache.scales.get(layer))
    view = TwoForms(key[0].half().float(), value[0].half().float(), k_far, v_far)
    out = torch.zeros_like(query[0]).transpose(0, 1)
    first = asked_from // ROWS_AT_ONCE * ROWS_AT_ONCE
    out[first:] = attend(query[0], view, fake_cache.policy, scaling, first=first).transpose(0, 1)
    return out[None], None


def formats(needles: Needles) -> dict[str, CacheSpec]:
    """What is measured, by name. Ours, and what others ship: 4 bits a token and head, with and without fp16 pages."""
    token = TensorFormat(4, ScaleKind.TOKEN)
    peer = KVFormat("per-token int4", token, token)
    ours = {
        name: needles.spec(FORMATS[name]) for name in ("fp16", "int8", "int4", "int4-static", "k8v4", "int8-static")
    }
    return {
        **ours,
        "per-token int4": needles.spec(peer),
        "per-token int4 without fp16 pages": needles.spec(peer, PagePolicy(0, 0)),
    }


def provenance(folder: Path, training: dict[str, Any], device: str) -> dict[str, str]:
    """What every record says of its model and machine. training: the model's training.json."""
    trained = "trained" if training["log"] else "untrained"
    start = "wired" if training["recipe"]["wired"] else "random"
    card = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    about = {"device": card, "torch": torch.__version__, "commit": measured_commit()}
    weights = file_sha256(folder / "model.safetensors")[:16]
    return {"model": f"{start} start, {trained}", "weights": weights, **about}


def main() -> None:
    """Measure and store; the last line of stdout is the summary as JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.needle", description="Recall by format, length and depth.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, default=Path("bench/results/needle.json"))
    parser.add_argument("--formats", help="only these, separated by commas; a summary needs fp16")
    parser.add_argument("--longest", type=int, default=max(LENGTHS), help="leave longer haystacks out")
    parser.add_argument("--haystacks", type=int, help="of each variant and length (default: 2 to 6)")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    training = json.loads((options.model / "training.json").read_text(encoding="utf-8"))
    about = provenance(options.model, training, device)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval().requires_grad_(False)
    needles = Needles(model.to(device), Language(**training["recipe"]["language"]))
    lengths = {tokens: options.haystacks or n for tokens, n in LENGTHS.items() if tokens <= options.longest}
    others = others_in(options.out, about["model"])
    records: list[dict[str, Any]] = []
    start = time.monotonic()
    for name, spec in formats(needles).items():
        if options.formats and name not in options.formats.split(","):
            continue
        records += [record | about for record in needles.records(name, spec, lengths)]
        print(f"{time.monotonic() - start:.0f} s: {name}, {len(records)} records", flush=True)
        options.out.write_text(_as_lines([*records, *others]), encoding="utf-8")
    print(json.dumps(summarise(records)))


def others_in(path: Path, model: str) -> list[dict[str, Any]]:
    """The records of other models that a file has: those of `model` are replaced."""
    records = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return [record for record in records if record["model"] != model]


def _as_lines(records: list[dict[str, Any]]) -> str:
    """A JSON list with a record a line."""
    return "[\n" + ",\n".join(json.dumps(record) for record in records) + "\n]\n"


AttentionInterface.register(ATTENTION, needle_attention)


if __name__ == "__main__":
    main()
