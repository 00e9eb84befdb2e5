"""What trtllm-build 1.2.1 and its runtime refuse, checked and explained before a GPU is asked for.

Each rule says what was asked for, what is allowed, why TensorRT-LLM is like that, and the way out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from build.trtllm.layout import check_divisible
from build.trtllm.plan import EnginePlan
from nibble.errors import NibbleError

BUILDER = "tensorrt_llm/builder.py"


@dataclass(frozen=True)
class Violation:
    """A rule that a plan breaks."""

    got: str
    allowed: str
    why: str
    way_out: str

    def __str__(self) -> str:
        return f"got {self.got}; allowed: {self.allowed}. Why: {self.why}. Do this: {self.way_out}"


def check_plan(plan: EnginePlan) -> None:
    """NibbleError with every rule that the plan breaks."""
    check_divisible(plan.config, plan.parallel)
    broken = list(violations(plan))
    if broken:
        raise NibbleError("HOST=trtllm: " + "\n  ".join(str(violation) for violation in broken))


def violations(plan: EnginePlan) -> Iterator[Violation]:
    """The rules that a plan breaks."""
    yield from _cache_rules(plan)
    yield from _size_rules(plan)


def _cache_rules(plan: EnginePlan) -> Iterator[Violation]:
    recipe = plan.recipe
    if recipe.cache == "int8" and recipe.paged_context_fmha:
        yield Violation(
            "an int8 cache with paged_context_fmha: true",
            "paged_context_fmha: false",
            f'{BUILDER} raises "Paged Context FMHA doesn\'t work with int8 kv cache currently": its fused prefill '
            "kernel can't read int8 blocks",
            "set it to false in recipes/trtllm/int8.yaml and do without block reuse and chunked context, or take "
            "KV=int4, whose kernels can",
        )
    if recipe.cache == "fp8" and recipe.paged_context_fmha:
        yield Violation(
            "an fp8 cache with paged_context_fmha: true and 16-bit weights",
            "paged_context_fmha: false",
            f'{BUILDER} raises "FP8 Paged Context FMHA only works with fp8 quantization workflow currently": with '
            "16-bit weights there is no scale to quantize Q with",
            "set it to false in recipes/trtllm/fp8.yaml, or build by hand from weights that ModelOpt quantized to fp8",
        )


def _size_rules(plan: EnginePlan) -> Iterator[Violation]:
    context, longest = plan.limits.max_context, plan.config["max_position_embeddings"]
    if context > longest:
        yield Violation(
            f"sequences of {context} tokens",
            f"up to {longest}",
            "RoPE of this model was trained for that many positions, and the builder makes its tables that long",
            f"CONTEXT={longest} or less",
        )
    if plan.max_num_tokens < plan.limits.max_running:
        yield Violation(
            f"{plan.limits.max_running} sequences at once and {plan.max_num_tokens} tokens a step",
            "at least one token a step for each sequence",
            "each running sequence adds a token to every step",
            "a smaller BATCH=, or a larger max_num_tokens in recipes/trtllm",
        )
    if plan.config["dtype"] not in ("float16", "bfloat16"):
        yield Violation(
            f"weights of type {plan.config['dtype']}",
            "float16 or bfloat16",
            "fused attention computes in 16 bits; without it neither prefill nor decode has a paged kernel",
            "dtype: bfloat16 in the model's recipe",
        )


def runtime_conflicts(plan: EnginePlan, *, reuse: bool, chunked: bool) -> list[Violation]:
    """What a server's configuration may not ask of this engine."""
    asked = [name for name, wanted in (("block reuse", reuse), ("chunked context", chunked)) if wanted]
    if plan.reuses_blocks or not asked:
        return []
    return [
        Violation(
            f"{' and '.join(asked)} on an engine without paged context FMHA",
            "neither",
            'the server stops with "When KV cache block reuse is set, model has to be built with paged context FMHA '
            'support"; where its check was removed, it crashed after some thousand requests',
            "leave both off, or build with KV=fp16 or KV=int4",
        )
    ]
