"""Plays TensorRT-LLM's executor over our cache: schedules, allocates, prepares metadata, runs layers, replays graphs.

K, V and Q of a token are looked up by its id and position, so that any way of computing a sequence has the same values.
Outputs are compared with the oracle's, over the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nibble.reference import reference_attention
from nibble.rotation import rotate
from nibble.trtllm.attention import make_attention_class
from nibble.trtllm.cache_engine import CacheEngine
from nibble.trtllm.kernels import PageKernels
from nibble.trtllm.manager import make_manager_class
from nibble.trtllm.metadata import make_metadata_class
from tests.trtllm import stand_in
from tests.trtllm.stand_in import KVCacheParams, LlmRequest, ScheduledRequests

GRAPH_DUMMY = (1 << 64) - 1  # the request that fills a graph's batch up
VOCABULARY = 40
MOST_CHECKED = 8  # sequences of a step whose outputs are compared; in a larger batch others each time


@dataclass(frozen=True)
class Model:
    """Sizes of the model that is played."""

    layers: int = 2
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    max_tokens: int = 1024
    max_batch: int = 4
    max_seq_len: int = 1024
    chunk: int = 256


class Values:
    """Q, K and V of every layer by token id and position; K has large channels."""

    def __init__(self, model: Model, dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (model.layers, VOCABULARY + model.max_seq_len)
        large = 1.0 + 3.0 * (torch.arange(model.head_dim) % 5 == 0)
        self._tables = [
            torch.randn(*shape, heads, model.head_dim, generator=generator) * size
            for heads, size in ((model.q_heads, 1.0), (model.kv_heads, large), (model.kv_heads, 1.0))
        ]
        self._dtype = dtype

    def of(self, layer: int, tokens: list[int], first: int = 0) -> list[torch.Tensor]:
        """Q, K, V of tokens[first:], each [tokens, heads, D]."""
        ids = torch.tensor(tokens[first:])
        positions = VOCABULARY + torch.arange(first, len(tokens))
        return [(table[layer, ids] + table[layer, positions]).to(self._dtype) for table in self._tables]


class Executor:
    """One model over one cache. kernels: the oracle's, or None for the GPU's."""

    def __init__(self, engine: CacheEngine, model: Model, kernels: PageKernels | None, dtype: torch.dtype) -> None:
        self.engine, self.model, self.values = engine, model, Values(model, dtype)
        metadata = make_metadata_class(stand_in.AttentionMetadata)
        attention = make_attention_class(stand_in.AttentionBackend, metadata)
        manager = make_manager_class(stand_in.KVCacheManager, engine, stand_in.DataType.INT8, kernels)
        self.manager = manager(
            stand_in.KvCacheConfig(max_tokens=model.max_tokens), "SELF", num_layers=model.layers,
            num_kv_heads=model.kv_heads, head_dim=model.head_dim, tokens_per_block=64, max_seq_len=model.max_seq_len,
            max_batch_size=model.max_batch, mapping=stand_in.Mapping(), max_num_tokens=model.chunk,
        )  # fmt: skip
        self.layers = [
            attention(layer, model.q_heads, model.head_dim, model.kv_heads, dtype=dtype)
            for layer in range(model.layers)
        ]
        self.metadata = metadata(
            max_num_requests=model.max_batch, max_num_tokens=model.chunk, kv_cache_manager=self.manager,
            mapping=stand_in.Mapping(),
        )  # fmt: skip
        self.running: dict[int, LlmRequest] = {}
        self.graphs: dict[int, Graph] = {}
        self.started: dict[int, int] = {}  # of each request, the first token that was computed
        self.checked = self._turn = 0
        self.manager.add_dummy_requests([GRAPH_DUMMY], [1])

    def submit(self, request_id: int, tokens: list[int]) -> LlmRequest:
        self.running[request_id] = LlmRequest(request_id, tokens)
        return self.running[request_id]

    def prefill(self, *request_ids: int, check: bool = True) -> None:
        """Run prompts to their end, chunk by chunk; the budget of a step is shared in order."""
        waiting = [self.running[request_id] for request_id in request_ids]
        while waiting:
            budget, batch = self.model.chunk, ScheduledRequests()
            for request in waiting:
                share = min(budget, request.prompt_len - request.context_current_position)
                if share < request.prompt_len - request.context_current_position:
                    share -= share % 64  # chunks are whole blocks, but for the last
                if share:
                    request.context_chunk_size, budget = share, budget - share
                    batch.context_requests.append(request)
            self._step(batch, check)
            waiting = [request for request in waiting if request.context_current_position < request.prompt_len]

    def generate(self, steps: int, *, graph: bool = False, check: bool = True) -> None:
        """One token a step for every running request; the next token follows from the last."""
        for _ in range(steps):
            for request in self.running.values():
                request.tokens.append((request.tokens[-1] * 7 + len(request.tokens)) % VOCABULARY)
            batch = ScheduledRequests(generation_requests=list(self.running.values()))
            self.manager.prepare_resources(batch)
            self._replay(check) if graph else self._run(batch, check)
            self.manager.ledger.check_integrity()

    def warm_up(self, batch: int, tokens: int) -> None:
        """As before a capture: a dummy as long as sequences may be, then those of one token, none of them prefilled."""
        dummies = self.manager.add_dummy_requests(list(range(batch)), [tokens] + [1] * (batch - 1))
        spans = [(dummy, len(dummy.tokens) - 1, len(dummy.tokens)) for dummy in dummies]
        graph = self.graphs.setdefault(batch, Graph(self, batch))
        self._fill(graph.metadata, spans, 0)
        graph.run([self._inputs(layer, spans) for layer in range(self.model.layers)])
        for dummy in dummies:
            self.manager.free_resources(dummy)
        self.manager.ledger.check_integrity()

    def finish(self, request_id: int) -> None:
        request = self.running.pop(request_id)
        request.tokens.append(0)  # sampled, never written
        self.manager.free_resources(request)

    def _step(self, batch: ScheduledRequests, check: bool) -> None:
        self.manager.prepare_resources(batch)
        for request in batch.context_requests:
            self.started.setdefault(request.py_request_id, request.context_current_position)
        self._run(batch, check)
        for request in batch.context_requests:
            request.context_current_position += request.context_chunk_size
        self.manager.update_resources(batch)
        self.manager.ledger.check_integrity()

    def _run(self, batch: ScheduledRequests, check: bool) -> None:
        """A forward pass without a graph."""
        spans = [
            (request, request.context_current_position, request.context_current_position + request.context_chunk_size)
            for request in batch.context_requests
        ] + [(request, len(request.tokens) - 1, len(request.tokens)) for request in batch.generation_requests]
        self._fill(self.metadata, spans, len(batch.context_requests))
        for layer in range(self.model.layers):
            out = self.layers[layer].forward(*self._inputs(layer, spans), self.metadata)
            if check:
                self._check(layer, spans, out)

    def _replay(self, check: bool) -> None:
        """A decode step through a graph, filled up with the dummy request; captured on first use."""
        batch = next(size for size in (1, 2, 4, 8, 16, 32, 64, 128) if size >= len(self.running))
        dummy = LlmRequest(GRAPH_DUMMY, [1])
        members = [*self.running.values(), *[dummy] * (batch - len(self.running))]
        spans = [(request, len(request.tokens) - 1, len(request.tokens)) for request in members]
        graph = self.graphs.get(batch)
        if graph is None:
            graph = self.graphs[batch] = Graph(self, batch)
        self._fill(graph.metadata, spans, 0)
        outputs = graph.run([self._inputs(layer, spans) for layer in range(self.model.layers)])
        if check:
            real = [span for span in spans if span[0] is not dummy]
            for layer, out in enumerate(outputs):
                self._check(layer, real, out[: len(real)])

    def _fill(self, metadata: Any, spans: list[tuple[LlmRequest, int, int]], contexts: int) -> None:
        metadata.request_ids = [request.py_request_id for request, _, _ in spans]
        metadata.seq_lens = torch.tensor([last - first for _, first, last in spans], dtype=torch.int)
        metadata.num_contexts = contexts
        metadata.kv_cache_params = KVCacheParams(True, [first for _, first, _ in spans])
        metadata.prepare()

    def _inputs(self, layer: int, spans: list[tuple[LlmRequest, int, int]]) -> list[torch.Tensor]:
        rows = [self.values.of(layer, request.tokens[:last], first) for request, first, last in spans]
        return [torch.cat(parts).flatten(1).to(stand_in.DEVICE) for parts in zip(*rows, strict=True)]

    def _check(self, layer: int, spans: list[tuple[LlmRequest, int, int]], out: torch.Tensor) -> None:
        found = out.float().cpu().unflatten(1, (self.model.q_heads, self.model.head_dim))
        pairs = list(zip(found.split([last - first for _, first, last in spans]), spans, strict=True))
        stride = -(-len(pairs) // MOST_CHECKED)
        self._turn += 1
        for rows, (request, first, last) in pairs[self._turn % stride :: stride]:
            expected = self._oracle(layer, request.tokens[:last], first)
            worst = float((rows - expected).abs().max())
            assert worst < 0.02, (
                f"request {request.py_request_id}, layer {layer}, tokens {first}..{last}: off by {worst}"
            )
            self.checked += 1

    def _oracle(self, layer: int, tokens: list[int], first: int) -> torch.Tensor:
        q, k, v = self.values.of(layer, tokens)
        transform, is_rotated = self.engine.transforms.get(layer), self.engine.rotates_value(layer)
        if transform is not None:
            q, k = transform.read(q), transform.store(k)
        v = rotate(v.float()) if is_rotated else v
        out = reference_attention(
            q[first:], k.half(), v.half(), fmt=self.engine.fmt, policy=self.engine.policy,
            softmax_scale=self.model.head_dim**-0.5, scales=self.engine.scales[layer], dtype=torch.float32,
        ).out  # fmt: skip
        return rotate(out) if is_rotated else out


class Graph:
    """A decode graph of one batch size: captured on a GPU; elsewhere the same calls on the same memory."""

    def __init__(self, executor: Executor, batch: int) -> None:
        self.metadata = executor.metadata.create_cuda_graph_metadata(batch)
        self._layers, self._graph = executor.layers, None
        self._static: list[list[torch.Tensor]] = []
        self._outputs: list[torch.Tensor] = []
        self._pointers: list[int] = []

    def run(self, inputs: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        if not self._static:
            self._static = [[tensor.clone() for tensor in layer] for layer in inputs]
        for static, layer in zip(self._static, inputs, strict=True):
            for target, source in zip(static, layer, strict=True):
                target.copy_(source)
        pointers = self._table_pointers()
        assert not self._pointers or pointers == self._pointers, "a graph's tables moved"
        if stand_in.DEVICE == "cpu":
            self._outputs = self._forward()
        elif self._graph is None:
            self._capture(self._forward)
        else:
            self._graph.replay()
        self._pointers = pointers
        return self._outputs

    def _capture(self, forward: Callable[[], list[torch.Tensor]]) -> None:
        forward()  # compiles kernels and allocates the workspace, as the executor's warm-up does
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = forward()
        self._graph.replay()

    def _forward(self) -> list[torch.Tensor]:
        return [layer.forward(*static, self.metadata) for layer, static in zip(self._layers, self._static, strict=True)]

    def _table_pointers(self) -> list[int]:
        tables = self.metadata.tables
        return [
            x.data_ptr() for x in (tables.slots, tables.seal_from, tables.generation_table(), tables.generation_lengths)
        ]
