"""What a Llama-like decoder is made of: sizes, norms, biases, windows, read from a Hugging Face config.

Llama, Mistral, Qwen2 and Qwen3 differ by a bias in Q, K and V and by norms over Q and K; Gemma 3 has norms behind
attention and MLP too, whose weights are kept as what they add to 1, and a RoPE that differs by layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from transformers import PretrainedConfig

from nibble.architecture import read_architecture
from nibble.errors import NibbleError
from nibble.runtime.decoder_ops import ACTIVATIONS, SILU
from nibble.runtime.shards import Shards

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")  # config.model_type


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder, or of one rank's part. windows: of each layer, in tokens, None for full attention."""

    family: str
    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    norm_epsilon: float
    windows: tuple[int | None, ...]
    has_qkv_bias: bool
    has_qk_norm: bool
    ties_embeddings: bool
    activation: str
    softmax_scale: float
    embedding_scale: float

    @property
    def is_gemma(self) -> bool:
        return self.family == "gemma3_text"

    @classmethod
    def of(cls, config: PretrainedConfig) -> DecoderShape:
        """The shape that a config describes; NibbleError for what this decoder does not compute."""
        facts = read_architecture(config.to_dict())
        if facts.family not in FAMILIES:
            raise NibbleError(f"{facts.family}: the GPU runtime allows {', '.join(FAMILIES)}; serve it with DEVICE=cpu")
        is_gemma = facts.family == "gemma3_text"
        activation = config.hidden_activation if is_gemma else getattr(config, "hidden_act", SILU)
        if activation not in ACTIVATIONS or getattr(config, "mlp_bias", False):
            raise NibbleError(
                f"{config.model_type}: activation {activation!r}, mlp_bias {getattr(config, 'mlp_bias', False)}; the "
                f"GPU runtime allows {', '.join(ACTIVATIONS)} without a bias; serve it with DEVICE=cpu"
            )
        if getattr(config, "final_logit_softcapping", None) or getattr(config, "use_bidirectional_attention", False):
            raise NibbleError(
                f"{config.model_type}: soft-capped logits or attention in both directions; the GPU runtime allows "
                "neither; serve it with DEVICE=cpu"
            )
        if facts.family != "qwen2" and getattr(config, "attention_bias", False):
            raise NibbleError(
                f"{config.model_type}: attention_bias is set; the GPU runtime allows biases of Q, K and V in qwen2 "
                "alone; serve it with DEVICE=cpu"
            )
        return cls(
            facts.family,
            config.hidden_size,
            config.intermediate_size,
            facts.num_q_heads,
            facts.num_kv_heads,
            facts.head_dim,
            config.vocab_size,
            config.rms_norm_eps,
            facts.windows,
            facts.family == "qwen2",
            facts.family == "qwen3" or is_gemma,
            bool(config.tie_word_embeddings),
            activation,
            (config.query_pre_attn_scalar if is_gemma else facts.head_dim) ** -0.5,
            config.hidden_size**0.5 if is_gemma else 1.0,
        )

    def split(self, shards: Shards) -> DecoderShape:
        """The shape of one rank's part."""
        return replace(
            self,
            q_heads=shards.part(self.q_heads, "query heads"),
            kv_heads=shards.part(self.kv_heads, "KV heads"),
            intermediate=shards.part(self.intermediate, "channels of the MLP"),
        )

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        """Rows of Q, K and V in the fused projection."""
        return self.q_heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim
