"""AttentionBackend of TensorRT-LLM 1.2.1 over our pages: append, seal, attend.

TensorRT-LLM applies RoPE and splits Q, K and V before it calls us (we say that we fuse neither). K goes into its basis
and V is rotated here, in products of D x D in fp32, and the output is rotated back: weights stay as TensorRT-LLM loads
them.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from nibble.errors import NibbleError
from nibble.rotation import hadamard_matrix
from nibble.trtllm.kernels import LayerPages

CAUSAL = "causal"


def make_attention_class(base: type[Any], metadata_class: type[Any]) -> type[Any]:
    """Our backend over TensorRT-LLM's AttentionBackend (or a stand-in)."""

    class NibbleAttention(base):
        """Attention of one layer. All sizes are those of one rank."""

        Metadata = metadata_class

        def __init__(
            self,
            layer_idx: int,
            num_heads: int,
            head_dim: int,
            num_kv_heads: int | None = None,
            quant_config: Any = None,
            q_scaling: float | None = None,
            attention_chunk_size: int | None = None,
            sparse_attention_config: Any = None,
            mla_params: Any = None,
            **options: Any,
        ) -> None:
            super().__init__(layer_idx, num_heads, head_dim, num_kv_heads, quant_config, **options)
            refused = {"chunked": attention_chunk_size, "sparse": sparse_attention_config, "latent": mla_params}
            if found := [name for name, value in refused.items() if value]:
                kind = ", ".join(found)
                raise NibbleError(f"layer {layer_idx}: {kind} attention, allowed plain causal attention; use TRTLLM")
            self._layer, self._q_heads, self._head_dim = layer_idx, num_heads, head_dim
            self._kv_heads = num_kv_heads or num_heads
            self._scale = 1.0 / (math.sqrt(head_dim) * (q_scaling or 1.0))
            self._rotation: torch.Tensor | None = None

        def forward(
            self,
            q: torch.Tensor,
            k: torch.Tensor | None,
            v: torch.Tensor | None,
            metadata: Any,
            *,
            attention_mask: Any = CAUSAL,
            output: torch.Tensor | None = None,
            **options: Any,
        ) -> torch.Tensor:
            """q: [tokens, q_heads * head_dim] after RoPE, k and v alike with KV heads. Returns q's shape and type.

            Sequences with several queries come first. Written into `output` where TensorRT-LLM gives one.
            """
            _refuse(self._layer, k, v, attention_mask, options)
            out = torch.zeros_like(q) if output is None else output
            count = metadata.tables.num_tokens
            assert k is not None and v is not None
            queries, keys, values = (x[:count].unflatten(-1, (-1, self._head_dim)) for x in (q, k, v))
            out[:count] = self._attend(queries, keys, values, metadata).flatten(1).to(out.dtype)
            return out

        def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any) -> torch.Tensor:
            manager, tables = metadata.kv_cache_manager, metadata.tables
            kernels, pages, engine = manager.kernels, manager.layer_pages(self._layer), manager.engine
            is_rotated, transform = engine.rotates_value(self._layer), engine.transforms.get(self._layer)
            if transform is not None:
                q, k = transform.read(q), transform.store(k)
            if is_rotated:
                v = self._rotate(v)
            if torch.float32 in (k.dtype, v.dtype):
                k, v = k.half(), v.half()  # as pages hold them; both alike
            kernels.append(k.contiguous(), v.contiguous(), pages, tables.slots)
            kernels.seal(pages, tables.seal_from, tables.seal_to)
            out = self._read(q.contiguous(), pages, metadata)
            return self._rotate(out) if is_rotated else out

        def _read(self, q: torch.Tensor, pages: LayerPages, metadata: Any) -> torch.Tensor:
            manager, tables = metadata.kv_cache_manager, metadata.tables
            split, parts = q.shape[0] - (tables.num_sequences - tables.num_contexts), []
            if split:
                plan = metadata.prefill_plan
                parts.append(manager.kernels.prefill(q[:split], pages, tables.context_tables(), plan, self._scale))
            if split < q.shape[0]:
                work = manager.decode_workspace(self._q_heads, self._kv_heads, self._head_dim)
                table, lengths = tables.generation_table(), tables.generation_lengths
                parts.append(manager.kernels.decode(q[split:], pages, table, lengths, self._scale, work))
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        def _rotate(self, values: torch.Tensor) -> torch.Tensor:
            """R v of every row, fp32. Sylvester's matrices are symmetric, so R is its own inverse."""
            if self._rotation is None:
                self._rotation = hadamard_matrix(self._head_dim).to(values.device, torch.float32)
            return values.float() @ self._rotation

        @classmethod
        def support_fused_rope(cls) -> bool:
            return False

        @classmethod
        def support_fused_qkv(cls) -> bool:
            return False

        @classmethod
        def support_mla(cls) -> bool:
            return False

    return NibbleAttention


def _refuse(
    layer: int, k: torch.Tensor | None, v: torch.Tensor | None, attention_mask: Any, options: dict[str, Any]
) -> None:
    """NibbleError for what a forward pass may ask of TensorRT-LLM's own attention and not of ours."""
    asked = [
        name
        for name in ("attention_window_size", "attention_sinks", "attention_mask_data")
        if options.get(name) is not None
    ]
    if getattr(attention_mask, "value", attention_mask) != CAUSAL:
        asked.append(f"mask {attention_mask}")
    if k is None or v is None:
        asked.append("fused QKV")
    if asked:
        raise NibbleError(f"layer {layer}: {', '.join(asked)}: allowed causal attention over the whole sequence")
