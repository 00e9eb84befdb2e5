"""AttentionMetadata of TensorRT-LLM 1.2.1 with our tables: filled on the host each step, read on the device.

The tables are allocated once; a captured graph reads the same memory at every replay, and `prepare`, which the executor
calls before each step, graph or not, copies new content into it. Nothing that depends on lengths is inside a graph.
"""

from __future__ import annotations

from typing import Any

import torch

from nibble.errors import NibbleError
from nibble.formats import PAGE_TOKENS
from nibble.trtllm.page_ledger import Row
from nibble.trtllm.step_plan import SequenceStep, StepPlan


def make_metadata_class(base: type[Any]) -> type[Any]:
    """Our metadata over TensorRT-LLM's AttentionMetadata (or a stand-in)."""

    class NibbleAttentionMetadata(base):
        """What a step's attention needs. The base class holds lengths, request ids and the KV-cache manager."""

        def __post_init__(self) -> None:
            super().__post_init__()
            self.tables = None if self.kv_cache_manager is None else StepTables.allocate(self)

        def prepare(self) -> None:
            """Plan the step and fill the tables. Called by the executor before each forward pass."""
            super().prepare()
            manager = self.kv_cache_manager
            if self.tables is None:
                raise NibbleError("KV cache on TensorRT-LLM: got a pass without a cache, allowed with ours only")
            sequences = _sequences(self)
            plan = manager.planner.plan(sequences)
            chunks = sequences[: self.num_contexts]
            self.prefill_plan = None
            if chunks:
                lengths = [sequence.length for sequence in chunks]
                new = [sequence.new for sequence in chunks]
                self.prefill_plan = manager.kernels.plan_prefill(new, lengths, manager.engine.policy)
            self.tables.fill(plan, sequences, self.num_contexts, is_graph=self.is_cuda_graph)

    return NibbleAttentionMetadata


class StepTables:
    """int32 tables on the device. A view of each has the step's size; a graph's views never change."""

    def __init__(self, sequences: int, tokens: int, pages: int, device: torch.device) -> None:
        self._device = device
        self._slots = torch.empty(tokens, dtype=torch.int32, device=device)
        self._seal = torch.empty(2, sequences + tokens // PAGE_TOKENS + 1, dtype=torch.int32, device=device)
        self._lengths = torch.empty(sequences, dtype=torch.int32, device=device)
        self._tables = torch.empty(3, sequences, pages, dtype=torch.int32, device=device)  # mixed, open, sealed
        self.num_tokens = self.num_seals = self.num_sequences = self.num_contexts = 0

    @classmethod
    def allocate(cls, metadata: Any) -> StepTables:
        """Tables for the largest step that the metadata is made for."""
        manager = metadata.kv_cache_manager
        sequences = metadata.max_num_sequences or metadata.max_num_requests
        tokens = max(metadata.max_num_tokens, sequences)
        return cls(sequences, tokens, manager.max_blocks_per_seq, manager.device)

    def fill(self, plan: StepPlan, sequences: list[SequenceStep], num_contexts: int, *, is_graph: bool) -> None:
        """Copy a plan into the tables. In a graph there is one place to seal for each sequence, filled up with -1."""
        self.num_tokens, self.num_sequences, self.num_contexts = len(plan.slots), len(sequences), num_contexts
        seal = plan.seal + [(-1, -1)] * (len(sequences) - len(plan.seal) if is_graph else 0)
        self.num_seals = len(seal)
        lengths = [sequence.length for sequence in sequences]
        self._copy(self._slots[: self.num_tokens], plan.slots)
        self._copy(self._seal[0, : self.num_seals], [slot for slot, _ in seal])
        self._copy(self._seal[1, : self.num_seals], [page for _, page in seal])
        self._copy(self._lengths[: len(lengths)], lengths)
        self._copy_rows(self.generation_table(), plan.generation_rows)
        for table, rows in zip(self.context_tables(), (plan.open_rows, plan.sealed_rows), strict=True):
            self._copy_rows(table, rows)

    @property
    def slots(self) -> torch.Tensor:
        return self._slots[: self.num_tokens]

    @property
    def seal_from(self) -> torch.Tensor:
        return self._seal[0, : self.num_seals]

    @property
    def seal_to(self) -> torch.Tensor:
        return self._seal[1, : self.num_seals]

    @property
    def generation_lengths(self) -> torch.Tensor:
        return self._lengths[self.num_contexts : self.num_sequences]

    def generation_table(self) -> torch.Tensor:
        """[generations, max_pages]: slots and sealed pages mixed."""
        return self._tables[0, self.num_contexts : self.num_sequences]

    def context_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Open and sealed, each [contexts, max_pages]."""
        return self._tables[1, : self.num_contexts], self._tables[2, : self.num_contexts]

    def _copy(self, target: torch.Tensor, values: list[int]) -> None:
        source = torch.tensor(values, dtype=torch.int32)
        target.copy_(source.pin_memory() if self._device.type == "cuda" else source, non_blocking=True)

    def _copy_rows(self, table: torch.Tensor, rows: list[Row]) -> None:
        """The rows into the table's first columns, -1 behind the shorter ones."""
        if not rows:
            return
        width = max(map(len, rows))
        source = torch.empty(len(rows), width, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        padded = source.numpy()
        for target, row in zip(padded, rows, strict=True):
            target[: len(row)], target[len(row) :] = row, -1
        table[:, :width].copy_(source, non_blocking=True)


def _sequences(metadata: Any) -> list[SequenceStep]:
    """What the executor says of each sequence."""
    dummies = metadata.kv_cache_manager.dummy_requests
    cached = metadata.kv_cache_params.num_cached_tokens_per_seq
    new = metadata.seq_lens.tolist()
    return [
        SequenceStep(
            request=request,
            cached=int(cached[index]),
            new=new[index],
            is_generation=index >= metadata.num_contexts,
            is_dummy=request in dummies,
        )
        for index, request in enumerate(metadata.request_ids)
    ]
