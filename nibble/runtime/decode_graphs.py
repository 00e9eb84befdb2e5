"""Decode steps as CUDA graphs: one for each padded batch size, all reading the same fixed buffers.

    write     the host describes the batch in the buffers
    seal      pages that became far, if any, in a graph of their own
    replay    the forward pass and the greedy tokens, left where the next step reads them
    read      the caller copies what it wants of the outputs before the next replay

Without graphs the same functions run one launch at a time; the answers are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from functools import partial
from typing import Any, TypeVar

import torch

from nibble.runtime.decoder import Decoder
from nibble.runtime.device_step import DecodeBuffers, batch_buckets
from nibble.runtime.sampler import SampledRows, pick_likeliest
from nibble.runtime.sequence import Sequence

Result = TypeVar("Result")
SEAL_LANES = 8  # layers that are sealed at once


class DecodeGraphs:
    """buffers: the step's inputs; logits: [slots, vocabulary], rows of the last step."""

    def __init__(self, decoder: Decoder, buffers: DecodeBuffers, max_running: int, *, captures: bool) -> None:
        self.decoder = decoder
        self.buffers = buffers
        self.buckets = batch_buckets(max_running)
        vocabulary, dtype = decoder.weights.shape.vocabulary, decoder.weights.head.dtype
        self.logits = torch.empty(max_running, vocabulary, dtype=dtype, device=buffers.device)
        on_gpu = buffers.device.type == "cuda"
        self._lanes = [torch.cuda.Stream(buffers.device) for _ in range(SEAL_LANES)] if on_gpu else []
        self._runs: dict[int, Callable[[], SampledRows]] = {}
        self._seal: Callable[[], None] = self._seal_pages
        self.drop()
        if captures:
            self._capture()

    def drop(self) -> None:
        """Let go of what was captured; steps are launched one kernel at a time from then on. Sums over several GPUs
        that a graph holds must be gone before the processes part."""
        self._runs = {batch: partial(self._forward, batch) for batch in self.buckets}
        self._seal = self._seal_pages

    @torch.inference_mode()
    def run(self, sequences: Rows[Sequence]) -> SampledRows:
        """One token of each sequence; the greedy choice of each, valid until the next run."""
        if self.buffers.write(sequences, self._bucket(len(sequences))):
            self._seal()
        rows = self.replay_of(len(sequences))()
        return SampledRows(*(part[: len(sequences)] for part in rows))

    def replay_of(self, num_sequences: int) -> Callable[[], SampledRows]:
        """The forward pass of a batch of that many, as the buffers describe it."""
        return self._runs[self._bucket(num_sequences)]

    def _bucket(self, num_sequences: int) -> int:
        return next(bucket for bucket in self.buckets if bucket >= num_sequences)

    def _forward(self, batch: int) -> SampledRows:
        step = self.buffers.step(batch)
        picked = pick_likeliest(self.decoder.logits(self.decoder.hidden_states(step), out=self.logits[:batch]))
        self.buffers.keep(step.slots, picked.tokens)
        return picked

    def _seal_pages(self) -> None:
        """Layer beside layer: each alone is too small for a GPU, and one after the other would cost a launch each."""
        pages = self.buffers.seals.unbind(0)
        layers = range(len(self.decoder.weights.layers))
        if self.buffers.device.type == "cpu":
            for layer in layers:
                self.decoder.backend.seal_pages(layer, *pages)
            return
        main = torch.cuda.current_stream()
        for stream in self._lanes:
            stream.wait_stream(main)
        for lane, stream in enumerate(self._lanes):
            with torch.cuda.stream(stream):
                for layer in layers[lane::SEAL_LANES]:
                    self.decoder.backend.seal_pages(layer, *pages)
        for stream in self._lanes:
            main.wait_stream(stream)

    @torch.inference_mode()
    def _capture(self) -> None:
        """Largest batch first, so that the others find room in its memory. Padded rows touch no page."""
        pool = torch.cuda.graph_pool_handle()
        self._seal = _captured(self._seal_pages, pool)
        for batch in reversed(self.buckets):
            padding = torch.tensor([[0], [0], [self.buffers.padding_slot], [-1], [0]], dtype=torch.int32)
            self.buffers.rows(batch).copy_(padding.expand(5, batch))
            self._runs[batch] = _captured(self._runs[batch], pool)


def _captured(function: Callable[[], Result], pool: Any) -> Callable[[], Result]:
    """Run once to warm up, then record; the result replays it and gives the recorded outputs."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        outputs = function()

    def replay() -> Result:
        graph.replay()
        return outputs

    return replay
