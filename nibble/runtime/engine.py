"""The engine: requests in, tokens out, one scheduler step at a time.

    engine = Engine.load(Path("engines/smollm2-135m/int4"))
    engine.submit(engine.encode("Once upon a time"), SamplingParams(max_tokens=32))
    while engine.has_work:
        for event in engine.step():
            print(event.text, end="")

One thread calls it. All its randomness comes from the requests' seeds.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nibble.errors import NibbleError
from nibble.formats import FORMATS, SealedPageLayout
from nibble.runtime.cache import CacheSpec
from nibble.runtime.decoder_weights import DecoderWeights
from nibble.runtime.device import choose_device
from nibble.runtime.device_runner import DeviceRunner
from nibble.runtime.model_runner import ModelRunner
from nibble.runtime.page_pool import PagePool
from nibble.runtime.page_table import PageTable
from nibble.runtime.request import (
    Completion,
    EngineLimits,
    EngineStats,
    FinishReason,
    SamplingParams,
    TokenEvent,
)
from nibble.runtime.runner import PendingTokens, Runner
from nibble.runtime.sampler import Sampled
from nibble.runtime.scheduler import Scheduler
from nibble.runtime.sequence import Sequence
from nibble.runtime.step import Span, Step
from nibble.runtime.text import TextStream, text_decoder
from nibble.runtime.weight_sources import ModelWeights

if TYPE_CHECKING:
    from nibble.manifest import Manifest


@dataclass(frozen=True)
class EngineOrigin:
    """Where an engine came from. fallback_reason: why its cache is not the one it was built with."""

    kv_name: str
    manifest: Manifest | None = None
    fallback_reason: str | None = None


class Engine:
    def __init__(
        self,
        model: PreTrainedModel | DecoderWeights,
        tokenizer: PreTrainedTokenizerBase,
        spec: CacheSpec,
        limits: EngineLimits | None = None,
        *,
        origin: EngineOrigin | None = None,
    ) -> None:
        """Takes the model over and changes it. `spec` says how each layer's K and V are kept.

        A model goes where `limits.device` says; `DecoderWeights` stay on their device.
        """
        limits = limits or EngineLimits()
        on_device = _place(model, spec, limits)
        self.limits = limits.for_gpu() if isinstance(on_device, DecoderWeights) else limits
        self.origin = origin or EngineOrigin(spec.formats[0].name)
        self.tokenizer = tokenizer
        self.spec = spec
        self.runner = _make_runner(on_device, spec, self.limits)
        self.pool_sizes = self.runner.pool_sizes
        open_pool, sealed_pool = PagePool(self.pool_sizes.open_pages), PagePool(self.pool_sizes.sealed_pages)
        self.pages = PageTable(open_pool, sealed_pool, spec.policy)
        self.scheduler = Scheduler(self.pages, self.limits)
        self.eos_token_ids = _eos_token_ids(model, tokenizer)
        self._decode = text_decoder(tokenizer)
        self._requests: dict[str, Sequence] = {}
        self._unread: PendingTokens | None = None
        self._prompt_tokens = self._tokens_generated = 0

    @classmethod
    def load(cls, engine_dir: Path, limits: EngineLimits | None = None, kv_fallback: str | None = None) -> Engine:
        """The engine that the build stage wrote. kv_fallback="fp16" keeps its cache in fp16 instead."""
        from nibble.runtime.load import load_engine

        return load_engine(engine_dir, limits or EngineLimits(), kv_fallback)

    @property
    def kv_name(self) -> str:
        """The KV format that is really in use."""
        return self.origin.kv_name

    @property
    def device(self) -> torch.device:
        """Where the model and the cache are."""
        return self.runner.device

    @property
    def fallback_reason(self) -> str | None:
        return self.origin.fallback_reason

    @property
    def manifest(self) -> Manifest | None:
        return self.origin.manifest

    @property
    def has_work(self) -> bool:
        return bool(self._requests) or self._unread is not None

    def encode(self, text: str) -> list[int]:
        """The tokens of plain text, with the special tokens that the tokenizer puts around it."""
        return list(self.tokenizer(text)["input_ids"])

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The tokens of a conversation in the model's chat template, ready for the assistant's answer."""
        if not self.tokenizer.chat_template:
            raise NibbleError("messages: this model's tokenizer has no chat template; send plain text instead")
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def submit(
        self, prompt_ids: list[int], params: SamplingParams, request_id: str | None = None, priority: int = 0
    ) -> str:
        """Queue a request; its id is returned. Raises NibbleError for a bad prompt, QueueFullError for a full queue."""
        request_id = request_id or secrets.token_hex(8)
        self._check_prompt(prompt_ids, request_id)
        sequence = Sequence(
            request_id,
            list(prompt_ids),
            params,
            TextStream(self._decode, params.stop),
            priority=priority,
            generator=torch.Generator().manual_seed(secrets.randbits(62) if params.seed is None else params.seed),
            prompt_tokens=len(prompt_ids),
        )
        self.scheduler.add(sequence)
        self._requests[request_id] = sequence
        self._prompt_tokens += len(prompt_ids)
        return request_id

    def cancel(self, request_id: str) -> None:
        """End a request at the next step; an unknown id is one that has ended already."""
        if request_id in self._requests:
            self._requests[request_id].cancelled = True

    def step(self, waiting: AbstractContextManager[object] | None = None) -> list[TokenEvent]:
        """Run one forward pass; one event for each token that came out and each request that was cancelled.

        On a GPU the next pass is launched before the tokens of the last one are read, so a pass's events come out of
        the call after, and a request may run for one token more than it needed. waiting: entered while this thread has
        nothing to do but wait for the device, or computes without need of the interpreter.
        """
        events = [self._end(s, FinishReason.CANCELLED) for s in list(self._requests.values()) if s.cancelled]
        waiting = waiting or nullcontext()
        if self.runner.overlaps:
            launched = self._launch()
            ready, self._unread = self._unread, launched
        else:
            with waiting:
                ready = self._launch()
        return events if ready is None else events + self._read(ready, waiting)

    def _launch(self) -> PendingTokens | None:
        step = self.scheduler.schedule()
        if step is None:
            return None
        asked = [span for span in step.spans if span.length == span.sequence.num_pending]
        pending = self.runner.launch(step, asked)
        for span in step.spans:
            self.pages.commit(span.sequence, span.length)
        for sequence in pending.sequences:
            sequence.num_unread += 1
        return pending

    def _read(self, pending: PendingTokens, waiting: AbstractContextManager[object]) -> list[TokenEvent]:
        with waiting:
            pending.wait()
        events = []
        for sequence, sampled in zip(pending.sequences, pending.read(), strict=True):
            sequence.num_unread -= 1
            if not sequence.ended:
                events.append(self._next_token(sequence, sampled))
        return events

    def generate(self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[Completion]:
        """Answer prompts (token ids) to the end, all at once; one set of parameters, or one for each prompt."""
        from nibble.runtime.collect import collect_completions

        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        return collect_completions(self, prompts, each)

    def logits(self, token_ids: list[int]) -> Iterator[torch.Tensor]:
        """What the model predicts after each token, reading the cache as it does when serving.

        Yields float32 [chunk, vocabulary] for consecutive chunks. The engine must be idle; no prefix is reused.
        """
        self._check_prompt(token_ids, "logits")
        if self.has_work:
            raise NibbleError("logits: the engine has requests running; finish or cancel them first")
        sequence = Sequence("logits", list(token_ids), SamplingParams(), TextStream(self._decode))
        try:
            while sequence.num_pending:
                length = min(self.limits.step_tokens, sequence.num_pending)
                pairs = self.pages.reserve(sequence, length)
                step = Step((Span(sequence, 0, length, self.spec.policy),), tuple(pairs))
                yield self.runner.logits(step, torch.arange(length))
                self.pages.commit(sequence, length)
        finally:
            self.pages.release_all(sequence)

    def stats(self) -> EngineStats:
        fp16 = SealedPageLayout(FORMATS["fp16"], self.spec.head_dim).bytes_per_token
        heads = self.spec.num_kv_heads
        return EngineStats(
            pages_free=self.pages.sealed_pool.num_free,
            pages_used=self.pages.sealed_pool.num_used,
            open_pages_free=self.pages.open_pool.num_free,
            open_pages_used=self.pages.open_pool.num_used,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            prefix_hit_tokens=self.scheduler.counters.prefix_hit_tokens,
            preemptions=self.scheduler.counters.preemptions,
            prompt_tokens=self._prompt_tokens,
            tokens_generated=self._tokens_generated,
            bytes_per_token=heads * sum(layout.bytes_per_token for layout in self.spec.layouts),
            bytes_per_token_fp16=heads * fp16 * len(self.spec.formats),
            pool_bytes=self.pool_sizes.bytes(self.spec),
            layers_by_format=dict(Counter(fmt.name for fmt in self.spec.formats)),
        )

    def close(self) -> None:
        """Let go of captured graphs and let other processes of this engine end, where there are any; it takes no more
        requests."""
        self.runner.close()

    def check_integrity(self) -> None:
        """AssertionError if a page is lost, held by nobody, or held twice."""
        self.pages.check_integrity(list(self._requests.values()))

    def _check_prompt(self, prompt_ids: list[int], request_id: str) -> None:
        vocabulary = self.runner.vocabulary
        if not prompt_ids:
            raise NibbleError("prompt: got no tokens, allowed 1 or more")
        if len(prompt_ids) > self.limits.max_context:
            raise NibbleError(
                f"prompt: got {len(prompt_ids)} tokens, allowed up to {self.limits.max_context}; shorten it or serve "
                "with a larger context"
            )
        if not all(0 <= token < vocabulary for token in prompt_ids):
            raise NibbleError(f"prompt: token ids must be 0 to {vocabulary - 1}")
        if request_id in self._requests:
            raise NibbleError(f"request id {request_id!r} is in use; choose another or leave it out")

    def _next_token(self, sequence: Sequence, sampled: Sampled) -> TokenEvent:
        if not sampled.is_finite:
            return self._end(sequence, FinishReason.ERROR, error="the model's logits are not finite")
        sequence.tokens.append(sampled.token)
        self._tokens_generated += 1
        ended = sampled.token in self.eos_token_ids and not sequence.params.ignore_eos
        text = "" if ended else sequence.text.push(sampled.token)
        reason = None
        if ended or sequence.text.stopped:
            reason = FinishReason.STOP
        elif sequence.num_generated >= sequence.params.max_tokens or len(sequence.tokens) > self.limits.max_context:
            reason = FinishReason.LENGTH
        details: dict[str, Any] = {"logprob": sampled.logprob, "top_logprobs": sampled.top_logprobs}
        if reason is None:
            return self._event(sequence, sampled.token, text, **details)
        return self._end(sequence, reason, sampled.token, text + sequence.text.flush(), **details)

    def _end(
        self, sequence: Sequence, reason: FinishReason, token: int | None = None, text: str = "", **details: Any
    ) -> TokenEvent:
        self.scheduler.finish(sequence)
        del self._requests[sequence.request_id]
        return self._event(sequence, token, text, finish_reason=reason, **details)

    def _event(self, sequence: Sequence, token: int | None, text: str, **details: Any) -> TokenEvent:
        return TokenEvent(
            sequence.request_id,
            token,
            text,
            prompt_tokens=sequence.prompt_tokens,
            generated_tokens=sequence.num_generated,
            cached_tokens=sequence.cached_tokens,
            **details,
        )


def _place(
    model: PreTrainedModel | DecoderWeights, spec: CacheSpec, limits: EngineLimits
) -> PreTrainedModel | DecoderWeights:
    """The model itself for a CPU, its weights on the device for a GPU."""
    if isinstance(model, DecoderWeights):
        return model
    device = choose_device(limits.device, model.config, spec)
    if device.type == "cpu":
        return model
    return DecoderWeights.read(model.config, ModelWeights(model), model.dtype, device)


def _make_runner(model: PreTrainedModel | DecoderWeights, spec: CacheSpec, limits: EngineLimits) -> Runner:
    return (DeviceRunner if isinstance(model, DecoderWeights) else ModelRunner)(model, spec, limits)


def _eos_token_ids(model: PreTrainedModel | DecoderWeights, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token that ends an answer, from the model's generation config and its tokenizer."""
    generation = getattr(model, "generation_config", None)
    configured = model.config.eos_token_id if generation is None else generation.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(token for token in [*ids, tokenizer.eos_token_id] if token is not None)
