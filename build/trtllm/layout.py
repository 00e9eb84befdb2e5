"""How a model is cut over GPUs: which rank has which layers, which rows of which tensor.

Ranks count tensor parallel first: rank = stage * tp + place. Layers that do not divide evenly go to the first stages.
KV heads fewer than tp are repeated, so that every rank has one whole head: with 2 heads on 4 ranks, ranks 0 and 1 both
hold head 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nibble.errors import NibbleError


@dataclass(frozen=True)
class Parallelism:
    """tensor, pipeline: how many ranks share a layer, and how many stages the layers are cut into."""

    tensor: int = 1
    pipeline: int = 1
    gpus_per_node: int = 8

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline

    @property
    def nodes(self) -> int:
        return -(-self.world_size // self.gpus_per_node)

    def place(self, rank: int) -> int:
        """The rank's place among those that share a layer."""
        return rank % self.tensor

    def stage(self, rank: int) -> int:
        return rank // self.tensor

    def layers(self, rank: int, num_layers: int) -> range:
        """The layers of a rank's stage."""
        each, more = divmod(num_layers, self.pipeline)
        stage = self.stage(rank)
        first = stage * each + min(stage, more)
        return range(first, first + each + (stage < more))


@dataclass(frozen=True)
class RankSizes:
    """The numbers that shapes are made of, for one rank. rows of Q, and of K (V has as many)."""

    q_rows: int
    kv_rows: int
    config: dict[str, Any]
    tensor: int

    @classmethod
    def of(cls, config: dict[str, Any], parallel: Parallelism) -> RankSizes:
        """config: a checkpoint's config.json. Raises NibbleError when the model can't be cut that way."""
        check_divisible(config, parallel)
        size, tp = config["head_size"], parallel.tensor
        kv_heads = max(config["num_key_value_heads"] // tp, 1)
        return cls(config["num_attention_heads"] // tp * size, kv_heads * size, config, tp)

    def shape(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """Names of a rule's shape, as numbers. Split dimensions are the rank's share."""
        sizes = {
            "vocab": self.config["vocab_size"],
            "padded_vocab": padded_vocab(self.config["vocab_size"], self.tensor) // self.tensor,
            "hidden": self.config["hidden_size"],
            "head": self.config["head_size"],
            "query": self.q_rows,
            "qkv": self.q_rows + 2 * self.kv_rows,
            "intermediate": self.config["intermediate_size"] // self.tensor,
            "one": 1,
        }
        return tuple(sizes[name] for name in names)


def padded_vocab(vocab_size: int, tensor: int) -> int:
    """Rows of lm_head: the vocabulary, made divisible by the ranks that share it."""
    return -(-vocab_size // tensor) * tensor


def check_divisible(config: dict[str, Any], parallel: Parallelism) -> None:
    """NibbleError naming what can't be shared by the ranks, and how many ranks could."""
    heads, kv_heads, tp = config["num_attention_heads"], config["num_key_value_heads"], parallel.tensor
    for name, count in (("query heads", heads), ("MLP channels", config["intermediate_size"])):
        if count % tp:
            raise NibbleError(f"tensor parallel: {count} {name} over {tp} ranks; allowed a divisor of {count}")
    if kv_heads % tp and tp % kv_heads:
        raise NibbleError(
            f"tensor parallel: {kv_heads} KV heads over {tp} ranks; allowed a divisor or a multiple of {kv_heads}"
        )
    if not 1 <= parallel.pipeline <= config["num_hidden_layers"]:
        raise NibbleError(
            f"pipeline parallel: got {parallel.pipeline} stages, allowed 1 to {config['num_hidden_layers']} (layers)"
        )
