"""Predicts whether decode attention of an engine runs on XQA, TensorRT-LLM's fused kernel, and on which of the two.

When XQA does not take a shape, the older MMHA kernel runs, which is slower with grouped heads and never says so. The
rules are data (data/xqa.json). Even where XQA can run, TensorRT-LLM steps aside when KV heads times batch do not fill
the GPU, unless TRTLLM_FORCE_XQA=1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from build.trtllm.schema import read_data


@dataclass(frozen=True)
class AttentionShape:
    """What XQA's choice depends on, of one rank. cache: fp16, int8 or fp8. group: query heads of a KV head."""

    cache: str
    dtype: str
    head_size: int
    group: int
    tokens_per_block: int
    beams: int = 1


@dataclass(frozen=True)
class Prediction:
    """kernel: HMMA (every GPU since Ampere), QGMMA (Hopper, fp8 only), or None for MMHA. why: in words."""

    architecture: int
    kernel: str | None
    why: str

    @property
    def gpus(self) -> str:
        """The cards of this architecture."""
        return str(read_data("xqa")["generations"][str(self.architecture)])


def predict_xqa(shape: AttentionShape, architecture: int) -> Prediction:
    """Which kernel decodes on that architecture (90 is sm_90)."""
    rules = read_data("xqa")
    smallest = rules["smallest_architecture"][shape.cache]
    if architecture < smallest:
        return Prediction(architecture, None, f"an {shape.cache} cache needs sm_{smallest}")
    if refusal := _shape_refusal(shape, rules):
        return Prediction(architecture, None, refusal)
    for kernel in rules["kernels"]:
        fits = architecture in kernel["architectures"] and shape.cache in kernel["cache"]
        if fits and shape.tokens_per_block in kernel["tokens_per_block"] and shape.beams in kernel["beams"]:
            note = "; int8 has no Hopper kernel" if shape.cache == "int8" and architecture == 90 else ""
            return Prediction(architecture, kernel["name"], f"group {shape.group}, head size {shape.head_size}{note}")
    return Prediction(
        architecture, None, f"blocks of {shape.tokens_per_block} tokens or {shape.beams} beams fit no kernel"
    )


def predictions(shape: AttentionShape) -> list[Prediction]:
    """One for each architecture that is known, oldest first."""
    return [predict_xqa(shape, int(name)) for name in read_data("xqa")["generations"]]


def _shape_refusal(shape: AttentionShape, rules: dict[str, Any]) -> str | None:
    low, high = rules["head_size"]
    if shape.dtype not in rules["computes_in"]:
        return f"it computes in {' and '.join(rules['computes_in'])}, not in {shape.dtype}"
    if not low <= shape.head_size <= high or shape.head_size % rules["head_size_multiple"]:
        return f"head size {shape.head_size}: allowed multiples of {rules['head_size_multiple']} from {low} to {high}"
    if shape.group * shape.beams > rules["largest_group_times_beam"]:
        return f"group {shape.group} times {shape.beams} beams is past {rules['largest_group_times_beam']}"
    if shape.group == 1 and shape.beams == 1:
        return "one query head a KV head (no grouping): MMHA is chosen"
    return None
