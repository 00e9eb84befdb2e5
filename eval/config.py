"""An evaluation plan: how much text, how long, how the speed is taken. `recipes/eval/<name>.yaml`, strict.

>>> load_plan("quick", windows=4).windows
4
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import Field

from nibble.errors import NibbleError
from nibble.paths import RECIPES_DIR
from nibble.recipes import recipe_names
from nibble.runtime.request import CPU_CHUNK_TOKENS
from nibble.strict_yaml import StrictModel, read_mapping, validate

LONG_TASKS = {"retrieval": 1600}  # tokens of the longest document with its answer; others stay below TASK_TOKENS
TASK_TOKENS = 512


class SpeedPlan(StrictModel):
    """How many streams at once, tokens of their prompts, how often (the median counts).

    decode_tokens: that each stream writes while all of them do.
    """

    prompt_tokens: Annotated[int, Field(ge=16, le=1 << 20)]
    decode_tokens: Annotated[int, Field(ge=2, le=65536)]
    streams: Annotated[int, Field(ge=1, le=256)]
    repeats: Annotated[int, Field(ge=1, le=99)]

    def tokens_written(self, streams: int, step_tokens: int) -> int:
        """By each of so many streams: `decode_tokens`, and what the first writes while the others' prompts are read.

        step_tokens: the most that an engine reads and writes in a step.
        """
        steps = math.ceil((streams - 1) * self.prompt_tokens / max(1, step_tokens - streams))
        return self.decode_tokens + steps


class TaskPlan(StrictModel):
    """Which offline tasks (eval/tasks), and how many documents of each."""

    names: Annotated[list[str], Field(min_length=1)]
    documents: Annotated[int, Field(ge=1, le=10_000)]


class NeedlePlan(StrictModel):
    """The grid of haystacks: prompt lengths in tokens, depths in per cent; all variants of eval/needle.py."""

    lengths: Annotated[list[Annotated[int, Field(ge=256, le=1 << 20)]], Field(min_length=1)]
    depths: Annotated[list[Annotated[int, Field(ge=0, le=100)]], Field(min_length=1)]


class EvalPlan(StrictModel):
    """windows of window_tokens each; memory_tokens: the sequence length at which the allocator is read.

    layer_tokens: how much of the first window is replayed layer by layer (0: nothing).
    """

    name: str
    windows: Annotated[int, Field(ge=1, le=100_000)]
    window_tokens: Annotated[int, Field(ge=16, le=1 << 20)]
    seed: Annotated[int, Field(ge=0, le=(1 << 31) - 1)]
    speed: SpeedPlan
    memory_tokens: Annotated[int, Field(ge=64, le=1 << 20)]
    layer_tokens: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    tasks: TaskPlan | None = None
    needle: NeedlePlan | None = None

    @property
    def max_context(self) -> int:
        """The longest sequence that any part of the plan needs."""
        timed = self.speed.prompt_tokens + self.speed.tokens_written(self.speed.streams, CPU_CHUNK_TOKENS)
        asked = max(self.needle.lengths) if self.needle else 0
        answered = [LONG_TASKS.get(name, TASK_TOKENS) for name in self.tasks.names] if self.tasks else [0]
        return max(self.window_tokens, self.memory_tokens + 1, timed, asked, *answered)


def load_plan(name: str, **overrides: Any) -> EvalPlan:
    """The plan of that name with fields replaced; None means not given. NibbleError (unknown name, bad value)."""
    if name not in recipe_names("eval"):
        raise NibbleError(f"evaluation plan: got {name!r}, allowed {', '.join(recipe_names('eval'))}")
    path = RECIPES_DIR / "eval" / f"{name}.yaml"
    plan = validate(EvalPlan, read_mapping(path), str(path))
    given = {key: value for key, value in overrides.items() if value is not None}
    return validate(EvalPlan, {**plan.model_dump(), **given}, "command line")
