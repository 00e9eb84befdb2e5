"""KVCacheManager of TensorRT-LLM 1.2.1 whose blocks are our sealed pages, with an fp16 pool and a ledger beside them.

    TensorRT-LLM's pool   [blocks, layers, 2, kv_heads * 64 * stored_head_dim] bytes
    a layer of it         uint8 [blocks * layers, kv_heads, page_bytes] from its first block on, page = block * layers

stored_head_dim is chosen so that a block has exactly the bytes of a page, scales inside; block reuse, eviction and
copies of whole blocks keep working without knowing it.
"""

from __future__ import annotations

from typing import Any

import torch

from nibble.errors import NibbleError
from nibble.formats import PAGE_TOKENS
from nibble.trtllm.cache_engine import CacheEngine, local_heads
from nibble.trtllm.kernels import GpuKernels, LayerPages, PageKernels
from nibble.trtllm.page_ledger import PageLedger
from nibble.trtllm.step_plan import StepPlanner

SPARE_SLOTS = 16  # fp16 pages beyond what running sequences need: they keep prefixes warm


def make_manager_class(
    base: type[Any], engine: CacheEngine, byte_type: Any, kernels: PageKernels | None = None
) -> type[Any]:
    """Our manager over TensorRT-LLM's (or a stand-in). byte_type: its DataType of one byte. kernels: ours when None."""

    class NibbleKVCacheManager(base):
        """Blocks as TensorRT-LLM counts them, pages as our kernels read them."""

        def __init__(
            self, kv_cache_config: Any, kv_cache_type: Any, *, num_kv_heads: Any, head_dim: int, tokens_per_block: int,
            max_batch_size: int, mapping: Any, dtype: Any = None, max_num_tokens: int = 8192, **options: Any,
        ) -> None:  # fmt: skip
            _check_model(engine, num_kv_heads, head_dim, tokens_per_block)
            self.engine = engine.for_heads(*local_heads(engine.num_kv_heads, mapping.tp_size, mapping.tp_rank))
            self.dummy_requests: set[int] = set()
            super().__init__(
                kv_cache_config, kv_cache_type, num_kv_heads=num_kv_heads, head_dim=engine.stored_head_dim,
                tokens_per_block=tokens_per_block, max_batch_size=max_batch_size, mapping=mapping, dtype=byte_type,
                max_num_tokens=max_num_tokens, **options,
            )  # fmt: skip
            self._pool = self.impl.get_primary_pool_data(0)
            self.device = self._pool.device
            self.engine = self.engine.to(self.device)
            self.kernels = kernels or GpuKernels(self.device)
            slots = count_slots(engine, max_batch_size, max_num_tokens)
            layers, heads = self.num_local_layers, self.engine.num_kv_heads
            self.ledger = PageLedger(slots, engine.policy, layers)
            self.planner = StepPlanner(self.ledger, self.get_batch_cache_indices)
            self._open = torch.zeros(
                layers, slots, 2, heads, PAGE_TOKENS, engine.head_dim, dtype=torch.float16, device=self.device
            )
            self._pages: dict[int, LayerPages] = {}
            self._workspace: Any = None

        def layer_pages(self, layer_idx: int) -> LayerPages:
            """The pages of a layer, by its number in the whole model."""
            if layer_idx not in self._pages:
                place = self.layer_offsets[layer_idx]
                sealed = flat_pages(self.impl.get_primary_pool_data(place), self.num_local_layers, self.engine)
                self._pages[layer_idx] = LayerPages(
                    self._open[place], sealed, self.engine.fmt, self.engine.policy, self.engine.scales[layer_idx]
                )
            return self._pages[layer_idx]

        def decode_workspace(self, q_heads: int, kv_heads: int, head_dim: int) -> Any:
            """Scratch memory of decode, shared by all layers and graphs: they run one after another."""
            if self._workspace is None:
                self._workspace = self.kernels.workspace(
                    self.max_batch_size + 1, q_heads, kv_heads, head_dim, self.max_blocks_per_seq
                )
            return self._workspace

        def prepare_resources(self, scheduled_batch: Any) -> None:
            """Let TensorRT-LLM allocate; then shorten prefix matches whose neighbours are not there in fp16."""
            new = [request for request in scheduled_batch.context_requests if request.is_first_context_chunk]
            chunks = [request.context_chunk_size for request in new]
            super().prepare_resources(scheduled_batch)
            for request, chunk in zip(new, chunks, strict=True):
                blocks = self.get_cache_indices(request)
                matched = request.context_current_position // PAGE_TOKENS
                self.ledger.mark_fresh(blocks[matched:])
                usable = self.ledger.usable_pages(blocks, matched)
                if usable < matched or request.context_current_position % PAGE_TOKENS:
                    _set_back(request, usable * PAGE_TOKENS, chunk)

        def add_dummy_requests(self, request_ids: list[int], *arguments: Any, **options: Any) -> Any:
            self.dummy_requests.update(request_ids)
            return super().add_dummy_requests(request_ids, *arguments, **options)

        def free_resources(self, request: Any, *arguments: Any, **options: Any) -> Any:
            self.planner.release(request.py_request_id)
            self.dummy_requests.discard(request.py_request_id)
            return super().free_resources(request, *arguments, **options)

        def rewind_kv_cache(self, request: Any, rewind_len: int) -> None:
            raise NibbleError(f"KV cache: rewinding {rewind_len} tokens, allowed none: a sealed page can't be reopened")

        def shutdown(self) -> None:
            self._pages.clear()
            self._open = self._open[:0]
            super().shutdown()

        def get_cache_bytes_per_token(self) -> int:
            """Bytes of one token in all layers of this rank, sealed."""
            return sum(self.num_kv_heads_per_layer) * engine.page_bytes // PAGE_TOKENS

        @staticmethod
        def get_cache_size_per_token(model_config: Any, mapping: Any, **options: Any) -> int:
            """The same before a manager exists: TensorRT-LLM sizes its pool with it."""
            layers = max(len(mapping.pp_layers(engine.num_layers)), 1)
            _, heads = local_heads(engine.num_kv_heads, mapping.tp_size, mapping.tp_rank)
            return layers * heads * engine.page_bytes // PAGE_TOKENS

    return NibbleKVCacheManager


def count_slots(engine: CacheEngine, max_batch_size: int, max_num_tokens: int) -> int:
    """fp16 pages that any step can need: sinks, recent and open ones of each sequence, and those of its new tokens."""
    each = engine.policy.sink_pages + engine.policy.recent_pages + 2
    return (max_batch_size + 1) * each + max_num_tokens // PAGE_TOKENS + SPARE_SLOTS


def flat_pages(layer_pool: torch.Tensor, layers: int, engine: CacheEngine) -> torch.Tensor:
    """A layer's blocks as uint8 [pages, kv_heads, page_bytes], contiguous, block b at page b * layers.

    layer_pool: [blocks, ...] of one byte an element, a slice of the pool of all layers, whose blocks stand one after
    another. NibbleError when the pool is laid out otherwise.
    """
    row = engine.num_kv_heads * engine.page_bytes
    blocks = layer_pool.shape[0]
    if layer_pool.element_size() != 1 or layer_pool[0].numel() != row or layer_pool.stride(0) != layers * row:
        raise NibbleError(
            f"KV pool of TensorRT-LLM: got {layer_pool.dtype} {tuple(layer_pool.shape)}, strides "
            f"{layer_pool.stride()}; allowed blocks of {row} bytes, {layers} layers apart, as 1.2.1 lays them out"
        )
    pages = (blocks - 1) * layers + 1
    return layer_pool.view(torch.uint8).as_strided(
        (pages, engine.num_kv_heads, engine.page_bytes), (row, engine.page_bytes, 1)
    )


def _set_back(request: Any, position: int, chunk: int) -> None:
    """Start a prompt at an earlier token than TensorRT-LLM matched, with no more tokens a step than were scheduled."""
    end = min(position + chunk, request.prompt_len)
    if end < request.prompt_len:
        end = end // PAGE_TOKENS * PAGE_TOKENS
    request.context_current_position = position
    request.context_chunk_size = max(end - position, 1)


def _check_model(engine: CacheEngine, num_kv_heads: Any, head_dim: int, tokens_per_block: int) -> None:
    heads = {num_kv_heads} if isinstance(num_kv_heads, int) else set(num_kv_heads)
    got = (sorted(heads), head_dim, tokens_per_block)
    allowed = ([engine.num_kv_heads], engine.head_dim, PAGE_TOKENS)
    if got != allowed:
        raise NibbleError(
            f"KV cache: got KV heads, head size and tokens a block of {got}, the engine was built for {allowed}; "
            "build it from the model that is served, and leave tokens_per_block at 64"
        )
