"""One interface to whatever answers: three methods, be it an engine in this process or a served endpoint.

Everything goes through the quantized cache: the native host scores text chunk by chunk through it, and both generate
token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from nibble.runtime import Engine, SamplingParams
from serve.client import TritonLLM

SHARED_TOKENS = 256  # fewer are read again rather than waited for
MAX_ALTERNATIVES = 20  # that a served endpoint reports for each token


@dataclass(frozen=True)
class Score:
    """Natural logarithm of a continuation's probability, and whether greedy decoding would have written it."""

    log_likelihood: float
    is_greedy: bool


@dataclass(frozen=True)
class Prompt:
    """What to answer, greedily. stop: the answer ends before the first of these."""

    text: str
    stop: tuple[str, ...]
    max_tokens: int


class LanguageHost(Protocol):
    """What an evaluation asks of a model."""

    def log_likelihood(self, pairs: Sequence[tuple[str, str]]) -> list[Score]:
        """Score each (context, continuation)."""

    def rolling_log_likelihood(self, texts: Sequence[str]) -> list[float]:
        """Natural logarithm of each text's probability, all of its tokens but a first one that nothing precedes."""

    def generate_until(self, prompts: Sequence[Prompt]) -> list[str]:
        """Greedy answers."""


class NativeHost:
    """An engine of this process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def log_likelihood(self, pairs: Sequence[tuple[str, str]]) -> list[Score]:
        return [self._score(context, continuation) for context, continuation in pairs]

    def rolling_log_likelihood(self, texts: Sequence[str]) -> list[float]:
        """Texts longer than the engine's context are read in windows of it, one after the other."""
        return [self._rolling(self._ids(text)) for text in texts]

    def generate_until(self, prompts: Sequence[Prompt]) -> list[str]:
        """Prompts that begin as another does are asked after it: its pages are read once."""
        ids = [self.engine.encode(prompt.text) for prompt in prompts]
        params = [SamplingParams(max_tokens=prompt.max_tokens, stop=prompt.stop) for prompt in prompts]
        answers: dict[int, str] = {}
        for batch in _leaders_first(ids):
            completions = self.engine.generate([ids[at] for at in batch], [params[at] for at in batch])
            answers |= {at: completion.text for at, completion in zip(batch, completions, strict=True)}
        return [answers[at] for at in range(len(prompts))]

    def _score(self, context: str, continuation: str) -> Score:
        """Tokens are cut where the context ends; spaces at its end belong to the continuation (as lm-eval does)."""
        bare = context.rstrip()
        head = self.engine.encode(bare) if bare else []
        whole = self.engine.encode(context + continuation) if bare else self._ids(context + continuation)
        first = max(1, _common_length(head, whole))
        logits = torch.cat(list(self.engine.logits(whole[:-1])))[first - 1 :].log_softmax(-1)
        targets = torch.tensor(whole[first:])
        picked = logits.gather(1, targets[:, None])[:, 0]
        return Score(float(picked.double().sum()), bool((logits.argmax(-1) == targets).all()))

    def _rolling(self, ids: list[int]) -> float:
        window, total = self.engine.limits.max_context, 0.0
        for start in range(0, len(ids) - 1, window - 1):
            part = ids[start : start + window]
            logits = torch.cat(list(self.engine.logits(part[:-1]))).log_softmax(-1)
            total += float(logits.gather(1, torch.tensor(part[1:])[:, None]).double().sum())
        return total

    def _ids(self, text: str) -> list[int]:
        """The text's tokens behind the token that begins or ends texts, so that its first token is predicted too."""
        ids, tokenizer = self.engine.encode(text), self.engine.tokenizer
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        return ids if start is None or ids[:1] == [start] else [start, *ids]


class TritonHost:
    """A served endpoint, over gRPC. It reports the 20 likeliest tokens of what it writes, and takes text.

    So a continuation is scored token by token, each asked for behind the text so far (the prefix cache makes that
    cheap). Where it leaves the 20 likeliest, the last of them bounds the rest from above and the score ends.
    """

    def __init__(self, url: str) -> None:
        self.client = TritonLLM(url)

    def log_likelihood(self, pairs: Sequence[tuple[str, str]]) -> list[Score]:
        return [self._score(context, continuation) for context, continuation in pairs]

    def rolling_log_likelihood(self, texts: Sequence[str]) -> list[float]:
        """The first character is given."""
        return [self._score(text[:1], text[1:]).log_likelihood for text in texts]

    def generate_until(self, prompts: Sequence[Prompt]) -> list[str]:
        return [
            self.client.generate(
                prompt.text, max_tokens=prompt.max_tokens, temperature=0.0, stop_words=list(prompt.stop)
            ).text
            for prompt in prompts
        ]

    def _score(self, context: str, continuation: str) -> Score:
        total, is_greedy = 0.0, True
        while continuation:
            chunk = self.client.generate(context, max_tokens=1, temperature=0.0, top_log_probs=MAX_ALTERNATIVES)
            (report,) = chunk.token_log_probs
            fitting = [each for each in report["top"] if each["token"] and continuation.startswith(each["token"])]
            if not fitting:
                return Score(total + min(each["logprob"] for each in report["top"]), is_greedy=False)
            taken = max(fitting, key=lambda each: len(each["token"]))
            is_greedy &= taken["token"] == report["token"]
            total += float(taken["logprob"])
            context, continuation = context + taken["token"], continuation[len(taken["token"]) :]
        return Score(total, is_greedy)


def _leaders_first(prompts: list[list[int]]) -> list[list[int]]:
    """The prompts' numbers in one or two batches: each of the second shares half of itself with one of the first."""
    leaders: list[int] = []
    followers: list[int] = []
    for number, prompt in enumerate(prompts):
        enough = max(SHARED_TOKENS, len(prompt) // 2)
        follows = any(_common_length(prompt, prompts[leader]) >= enough for leader in leaders)
        (followers if follows else leaders).append(number)
    return [batch for batch in (leaders, followers) if batch]


def _common_length(first: list[int], second: list[int]) -> int:
    """How many leading tokens two rows share; always fewer than the second has."""
    shared = 0
    for left, right in zip(first, second[:-1], strict=False):
        if left != right:
            break
        shared += 1
    return shared
