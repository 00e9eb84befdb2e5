"""Runs steps on a GPU: decoding sequences in a graph, prompts' chunks beside it, tokens picked and kept on the device.

The next step takes its tokens from where this one left them, so the host may launch it before it has read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch

from nibble.errors import NibbleError
from nibble.formats import PAGE_TOKENS
from nibble.kernels.decode import DecodeWorkspace
from nibble.kernels.instances import MAX_BATCH
from nibble.runtime.cache import CacheSpec, CacheStorage, PoolSizes
from nibble.runtime.cuda_backend import AttentionKernels, CudaBackend
from nibble.runtime.decode_graphs import DecodeGraphs
from nibble.runtime.decoder import Decoder
from nibble.runtime.decoder_weights import DecoderWeights
from nibble.runtime.device import log
from nibble.runtime.device_memory import free_for_pages
from nibble.runtime.device_step import DecodeBuffers, PrefillStep, to_device
from nibble.runtime.model_runner import check_model
from nibble.runtime.request import EngineLimits
from nibble.runtime.sampler import Choices, Sampled, SampledRows, pick_as_asked, pick_likeliest, read_rows
from nibble.runtime.sequence import Sequence
from nibble.runtime.step import Span, Step


@dataclass(frozen=True)
class DeviceTokens:
    """Tokens on their way to the host. picked: of consecutive sequences; ready: None where nothing is to wait for."""

    sequences: list[Sequence]
    picked: list[tuple[list[Sequence], SampledRows]]
    ready: torch.cuda.Event | None

    def wait(self) -> None:
        if self.ready is not None:
            self.ready.synchronize()

    def read(self) -> list[Sampled]:
        return [sampled for sequences, rows in self.picked for sampled in read_rows(rows, sequences)]


class DeviceRunner:
    """See `Runner`. kernels: what attends; uses_graphs: False launches decode steps kernel by kernel."""

    overlaps = True

    def __init__(
        self,
        weights: DecoderWeights,
        spec: CacheSpec,
        limits: EngineLimits,
        *,
        kernels: AttentionKernels | None = None,
        uses_graphs: bool = True,
    ) -> None:
        check_model(weights.config, spec, limits)
        if limits.max_running > MAX_BATCH:
            raise NibbleError(f"max_running: got {limits.max_running}, allowed up to {MAX_BATCH} on a GPU")
        self.device = weights.norm.device
        self.vocabulary = weights.shape.vocabulary
        spec, free_bytes = weights.shards.split_spec(spec), free_for_pages(weights, limits)
        if free_bytes is not None:
            free_bytes = weights.shards.least(free_bytes, self.device)
        self.pool_sizes = PoolSizes.for_limits(spec, limits, free_bytes)
        log.info("pools: %s", self.pool_sizes.describe(spec))
        storage = CacheStorage(spec, self.pool_sizes, self.device)
        max_pages = -(-limits.max_context // PAGE_TOKENS)
        heads = (weights.shape.q_heads, weights.shape.kv_heads, weights.shape.head_dim)
        workspace = DecodeWorkspace.allocate(limits.max_running, *heads, max_pages, self.device)
        self.backend = CudaBackend(storage, workspace, kernels or AttentionKernels())
        self.decoder = Decoder.over(weights, spec, self.backend)
        buffers = DecodeBuffers(limits.max_running, max_pages, self.device)
        captures = uses_graphs and self.device.type == "cuda"
        self.graphs = DecodeGraphs(self.decoder, buffers, limits.max_running, captures=captures)
        self.most_prompt_keys = 2 * limits.max_context

    @torch.inference_mode()
    def launch(self, step: Step, asked: Rows[Span]) -> DeviceTokens:
        """See `Runner.launch`."""
        picked = []
        decoding = [span.sequence for span in step.spans if span.length == 1]
        if decoding:
            greedy = self.graphs.run(decoding)
            logits = self.graphs.logits[: len(decoding)]
            picked.append((decoding, self._pick(logits, greedy, decoding, are_kept=True)))
        wanted = {id(span) for span in asked}
        for spans in self._group_prompts([span for span in step.spans if span.length > 1]):
            ending = [span for span in spans if id(span) in wanted]
            hidden_states = self._prefill(spans)
            if ending:
                sequences = [span.sequence for span in ending]
                logits = self.decoder.logits(hidden_states[self._last_rows(spans, wanted)])
                picked.append((sequences, self._pick(logits, pick_likeliest(logits), sequences)))
        return self._send_to_host(picked)

    @torch.inference_mode()
    def logits(self, step: Step, rows: torch.Tensor) -> torch.Tensor:
        """See `Runner.logits`."""
        hidden_states = self._prefill(step.spans)
        return self.decoder.logits(hidden_states[rows.to(self.device)]).float().cpu()

    def close(self) -> None:
        """See `Runner.close`."""
        self.graphs.drop()

    def _prefill(self, spans: Rows[Span]) -> torch.Tensor:
        return self.decoder.hidden_states(PrefillStep.of(spans, self.backend.storage.spec.policy, self.device))

    def _group_prompts(self, spans: list[Span]) -> Iterator[list[Span]]:
        """Chunks that go through the model together: as many as the scratch of prefill has room for."""
        group: list[Span] = []
        keys = 0
        for span in spans:
            length = span.sequence.num_computed + span.length
            if group and keys + length > self.most_prompt_keys:
                yield group
                group, keys = [], 0
            group.append(span)
            keys += length
        if group:
            yield group

    def _last_rows(self, spans: list[Span], wanted: set[int]) -> torch.Tensor:
        rows, start = [], 0
        for span in spans:
            start += span.length
            if id(span) in wanted:
                rows.append(start - 1)
        return to_device(rows, torch.int64, self.device)

    def _pick(
        self, logits: torch.Tensor, greedy: SampledRows, sequences: list[Sequence], *, are_kept: bool = False
    ) -> SampledRows:
        """The tokens as the sequences ask for them, left behind for the next step. are_kept: the greedy ones are."""
        choices, shards = Choices.of(sequences, self.device), self.decoder.weights.shards
        if choices is None and are_kept and shards.size == 1:
            return greedy
        picked = greedy if choices is None else pick_as_asked(logits, greedy, choices)
        shards.as_first(picked.tokens)
        slots = to_device([sequence.slot for sequence in sequences], torch.int64, self.device)
        self.graphs.buffers.keep(slots, picked.tokens)
        return picked

    def _send_to_host(self, picked: list[tuple[list[Sequence], SampledRows]]) -> DeviceTokens:
        sequences = [sequence for part, _ in picked for sequence in part]
        if self.device.type == "cpu":
            return DeviceTokens(
                sequences, [(part, SampledRows(*map(torch.clone, rows))) for part, rows in picked], None
            )
        sent = [(part, SampledRows(*map(_to_pinned, rows))) for part, rows in picked]
        ready = torch.cuda.Event()
        ready.record()
        return DeviceTokens(sequences, sent, ready)


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
