"""A stand-in for the interfaces of TensorRT-LLM 1.2.1's PyTorch runtime that our cache touches, on any device.

Names, signatures, order of calls and the meaning of fields are those of _torch/attention_backend/interface.py,
_torch/pyexecutor/{resource_manager,_util}.py of the 1.2 line; the C++ block manager is a small one in Python that
matches whole blocks of a prefix, hands out blocks and keeps released ones until they are needed, as the real one does.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from types import SimpleNamespace
from typing import Any

import torch

DEVICE = "cpu"  # where pools are; the GPU tests change it


class DataType(Enum):
    HALF = 2
    INT8 = 1


class PredefinedAttentionMask(StrEnum):
    CAUSAL = "causal"
    FULL = "full"


@dataclass
class KvCacheConfig:
    max_tokens: int = 4096
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = False
    host_cache_size: int = 0
    tokens_per_block: int = 64
    dtype: str = "auto"
    max_attention_window: list[int] | None = None


@dataclass
class Mapping:
    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1

    def pp_layers(self, num_layers: int) -> list[int]:
        return list(range(num_layers))


@dataclass
class KVCacheParams:
    use_cache: bool
    num_cached_tokens_per_seq: list[int]


class LlmRequest:
    """A request: its prompt, how far it is, how much of it the scheduler gave to the coming step."""

    prompt_len = context_current_position = context_chunk_size = 0  # attributes of the C++ class there

    def __init__(self, request_id: int, tokens: list[int]) -> None:
        self.py_request_id = request_id
        self.prompt_len = len(tokens)
        self.tokens = list(tokens)
        self.context_current_position = 0
        self.context_chunk_size = 0

    @property
    def is_first_context_chunk(self) -> bool:
        return self.context_current_position == 0

    def set_prepopulated_prompt_len(self, length: int, tokens_per_block: int) -> None:
        """As in C++: begin behind the match; a chunk that is not the last ends where a block ends."""
        chunk = self.context_chunk_size
        if length + chunk < self.prompt_len:
            chunk = (length + chunk) // tokens_per_block * tokens_per_block - length
        self.context_current_position = length
        self.context_chunk_size = min(chunk, self.prompt_len - length)


@dataclass
class ScheduledRequests:
    context_requests: list[LlmRequest] = field(default_factory=list)
    generation_requests: list[LlmRequest] = field(default_factory=list)


class KVCacheManagerCpp:
    """Blocks: a pool [blocks, layers, 2, bytes], sequences that hold some, prefixes that are found again."""

    def __init__(self, *, blocks: int, layers: int, block_elements: int, tokens_per_block: int, reuse: bool) -> None:
        self._pool = torch.zeros(blocks, layers, 2, block_elements, dtype=torch.int8, device=DEVICE)
        self._tokens_per_block, self._reuse = tokens_per_block, reuse
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(blocks))
        self._holders = [0] * blocks
        self._block_of_prefix: dict[tuple[int, ...], int] = {}
        self._prefix_of_block: dict[int, tuple[int, ...]] = {}
        self._sequences: dict[int, tuple[LlmRequest, list[int], int]] = {}
        self.max_blocks_per_seq = blocks

    def get_primary_pool_data(self, layer_offset: int) -> torch.Tensor:
        return self._pool[:, layer_offset]

    def add_sequence(self, request_id: int, prompt_len: int, beam_width: int, request: LlmRequest) -> None:
        size, blocks = self._tokens_per_block, []
        if self._reuse:
            for end in range(size, prompt_len, size):  # the last token is always computed
                block = self._block_of_prefix.get(tuple(request.tokens[:end]))
                if block is None:
                    break
                self._hold(block)
                blocks.append(block)
        matched = len(blocks) * size
        while len(blocks) * size < prompt_len:
            blocks.append(self._new_block())
        self._sequences[request_id] = (request, blocks, prompt_len)
        if matched:
            request.set_prepopulated_prompt_len(matched, size)

    def add_token(self, request_id: int) -> None:
        request, blocks, length = self._sequences[request_id]
        if length == len(blocks) * self._tokens_per_block:
            blocks.append(self._new_block())
        self._sequences[request_id] = (request, blocks, length + 1)

    def store_context_blocks(self, request: LlmRequest) -> None:
        self._store(request, request.prompt_len)

    def remove_sequence(self, request_id: int, request: LlmRequest) -> None:
        self._store(request, len(request.tokens) - 1)  # the newest token was never written
        for block in self._sequences.pop(request_id)[1]:
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free[block] = None

    def get_batch_cache_block_ids(self, request_ids: list[int]) -> list[list[int]]:
        return [list(self._sequences[request_id][1]) for request_id in request_ids]

    def _store(self, request: LlmRequest, length: int) -> None:
        if not self._reuse:
            return
        blocks = self._sequences[request.py_request_id][1]
        for number, block in enumerate(blocks[: length // self._tokens_per_block], 1):
            prefix = tuple(request.tokens[: number * self._tokens_per_block])
            if prefix not in self._block_of_prefix:
                self._block_of_prefix[prefix], self._prefix_of_block[block] = block, prefix

    def _hold(self, block: int) -> None:
        self._holders[block] += 1
        self._free.pop(block, None)

    def _new_block(self) -> int:
        block, _ = self._free.popitem(last=False)  # the one that was let go first
        prefix = self._prefix_of_block.pop(block, None)
        if prefix is not None:
            del self._block_of_prefix[prefix]
        self._holders[block] = 1
        return block


class KVCacheManager:
    """resource_manager.KVCacheManager, as far as attention and scheduling use it."""

    def __init__(
        self, kv_cache_config: KvCacheConfig, kv_cache_type: Any, *, num_layers: int, num_kv_heads: int, head_dim: int,
        tokens_per_block: int, max_seq_len: int, max_batch_size: int, mapping: Mapping, dtype: DataType = DataType.HALF,
        spec_config: Any = None, layer_mask: Any = None, max_num_tokens: int = 8192, model_config: Any = None,
        max_beam_width: int = 1, is_draft: bool = False, kv_connector_manager: Any = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        self.dtype, self.head_dim, self.tokens_per_block = dtype, head_dim, tokens_per_block
        self.num_local_layers, self.max_batch_size = num_layers, max_batch_size
        self.layer_offsets = {layer: layer for layer in range(num_layers)}
        heads = (num_kv_heads + mapping.tp_size - 1) // mapping.tp_size
        self.num_kv_heads_per_layer = [heads] * num_layers
        self.blocks_in_primary_pool = -(-kv_cache_config.max_tokens // tokens_per_block)
        assert self.get_cache_bytes_per_token() > 0  # the real one sizes the pool with it
        self.impl = KVCacheManagerCpp(
            blocks=self.blocks_in_primary_pool, layers=num_layers, block_elements=heads * tokens_per_block * head_dim,
            tokens_per_block=tokens_per_block, reuse=kv_cache_config.enable_block_reuse,
        )  # fmt: skip
        self.max_blocks_per_seq = -(-max_seq_len // tokens_per_block)

    def get_cache_bytes_per_token(self) -> int:
        if self.dtype is not DataType.HALF:
            raise ValueError(f"Cannot support {self.dtype} KV cache.")
        return 4 * sum(self.num_kv_heads_per_layer) * self.head_dim

    def prepare_resources(self, scheduled_batch: ScheduledRequests) -> None:
        for request in scheduled_batch.context_requests:
            if request.is_first_context_chunk:
                self.impl.add_sequence(request.py_request_id, request.prompt_len, 1, request)
        for request in scheduled_batch.generation_requests:
            self.impl.add_token(request.py_request_id)

    def add_dummy_requests(
        self, request_ids: list[int], token_nums: list[int] | None = None, **_: Any
    ) -> list[LlmRequest]:
        requests = []
        for place, request_id in enumerate(request_ids):
            request = LlmRequest(request_id, [1] * (token_nums[place] if token_nums else 1))
            self.impl.add_sequence(request_id, request.prompt_len, 1, request)
            requests.append(request)
        return requests

    def update_resources(self, scheduled_batch: ScheduledRequests) -> None:
        for request in scheduled_batch.context_requests:
            if request.context_current_position >= request.prompt_len:
                self.impl.store_context_blocks(request)

    def free_resources(self, request: LlmRequest, pin_on_release: bool = False) -> None:
        self.impl.remove_sequence(request.py_request_id, request)

    def get_cache_indices(self, request: LlmRequest, window_size: int | None = None) -> list[int]:
        return self.impl.get_batch_cache_block_ids([request.py_request_id])[0]

    def get_batch_cache_indices(self, request_ids: list[int], window_size: int | None = None) -> list[list[int]]:
        return self.impl.get_batch_cache_block_ids(request_ids)

    def rewind_kv_cache(self, request: LlmRequest, rewind_len: int) -> None:
        raise NotImplementedError

    @staticmethod
    def get_cache_size_per_token(model_config: Any, mapping: Mapping, **kwargs: Any) -> int:
        raise NotImplementedError

    def shutdown(self) -> None:
        self.impl = None  # type: ignore[assignment]


@dataclass(kw_only=True)
class AttentionMetadata:
    """interface.AttentionMetadata without its cross-attention half; lengths are a property there, an attribute here."""

    max_num_requests: int
    max_num_tokens: int
    max_num_sequences: int | None = None
    kv_cache_manager: Any
    mapping: Any = None
    is_cuda_graph: bool = False
    seq_lens: torch.Tensor | None = None
    num_contexts: int = 0
    kv_cache_params: KVCacheParams | None = None
    request_ids: list[int] | None = None
    prompt_lens: list[int] | None = None
    runtime_features: Any = None

    def __post_init__(self) -> None:
        return None

    def prepare(self) -> None:
        return None

    def create_cuda_graph_metadata(self, max_batch_size: int, **_: Any) -> Any:
        if self.is_cuda_graph:
            return self
        metadata = copy.copy(self)
        metadata.is_cuda_graph = True
        metadata.seq_lens = torch.ones(max_batch_size, dtype=torch.int)
        metadata.num_contexts = 0
        metadata.__post_init__()
        return metadata


class AttentionBackend:
    Metadata = AttentionMetadata

    def __init__(
        self, layer_idx: int, num_heads: int, head_dim: int, num_kv_heads: int | None = None, quant_config: Any = None,
        skip_create_weights_in_init: bool = False, sparse_attention_config: Any = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        self.layer_idx, self.num_heads, self.head_dim = layer_idx, num_heads, head_dim

    @classmethod
    def support_fused_rope(cls) -> bool:
        return False

    support_fused_qkv = support_mla = support_fused_rope


class TrtllmAttention(AttentionBackend):
    """What TensorRT-LLM takes when it does not know a name."""


def get_attention_backend(backend_name: str, sparse_attn_config: Any = None) -> type[AttentionBackend]:
    return {"TRTLLM": TrtllmAttention}.get(backend_name, TrtllmAttention)


def get_kv_cache_manager_cls(model_config: Any) -> type[Any]:
    return KVCacheManager


class KvCacheCreator:
    """_util.KvCacheCreator: chooses the manager's class once the model is made."""

    def __init__(
        self, *, model_engine: Any, kv_cache_config: KvCacheConfig, speculative_config: Any = None, **_: Any
    ) -> None:
        self._kv_cache_manager_cls = lookup.get_kv_cache_manager_cls(model_engine.model.model_config)


lookup = SimpleNamespace(get_kv_cache_manager_cls=get_kv_cache_manager_cls)
