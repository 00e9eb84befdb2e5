"""Runs a model over windows of text through fake-quantized caches, and measures each against the fp16 cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from transformers import PreTrainedModel

from bench.quality_attention import HOOK, NAME
from bench.quality_schemes import FP16, Scheme
from bench.quality_statistics import LayerStatistics, SampleCollector

LOGITS_AT_ONCE = 1 << 26  # elements
BUCKETS = (0, 256, 1024, 2048, 4096, 6144, 8192, 16384, 32768)


@dataclass(frozen=True)
class Measured:
    """Arrays [windows, positions]: KL to the fp16 cache in nats, both losses, and whether the top token is the same.

    step: the positions are the last of every `step` tokens.
    """

    kl: np.ndarray
    nll: np.ndarray
    nll_fp16: np.ndarray
    same: np.ndarray
    step: int = 1

    def record(self) -> dict[str, object]:
        """The figures of a record of quality.json."""
        loss, base, tokens = float(self.nll.mean()), float(self.nll_fp16.mean()), self.kl.shape[1] * self.step
        return {
            "kl_mean": _round(self.kl.mean()),
            "kl_p999": _round(np.quantile(self.kl, 0.999)),
            "kl_standard_error": _round(self.kl.mean(1).std(ddof=1) / len(self.kl) ** 0.5)
            if len(self.kl) > 1
            else None,
            "ppl_fp16": _round(np.exp(base)),
            "ppl_delta_pct": _round(100 * np.expm1(loss - base)),
            "top1_agreement": _round(self.same.mean()),
            "kl_by_position": {
                f"{low}-{min(high, tokens)}": _round(self.kl[:, low // self.step : high // self.step].mean())
                for low, high in pairwise(BUCKETS)
                if low < tokens
            },
            "windows": self.kl.shape[0],
            "window_tokens": tokens,
            "position_step": self.step,
            "tokens": int(self.kl.size),
        }


class Bench:
    """A model with its calibration samples and the fp16 cache's answers on the windows."""

    def __init__(
        self, model: PreTrainedModel, calibration: torch.Tensor, batch: int = 1, positions: int = 0, *, step: int = 1
    ) -> None:
        """calibration: token ids [windows, tokens], run at offsets spread over `positions`, so that K is seen at every
        angle that RoPE gives it. step: only every so many positions are compared (a divisor of the windows' length).
        The model's attention is replaced."""
        model.set_attn_implementation(NAME)
        self.model, self.batch, self.reference_scheme, self.step = model, batch, FP16, step
        collector = SampleCollector()
        HOOK.seen = collector
        HOOK.view, HOOK.policy = FP16.viewer(_no_statistics(model)), FP16.policy
        with torch.inference_mode():
            for index, window in enumerate(calibration.to(model.device)):
                offset = max(0, positions - len(window)) * index // max(1, len(calibration) - 1)
                model.model(window[None], position_ids=offset + torch.arange(len(window), device=model.device)[None])
        HOOK.seen = None
        self.statistics = collector.statistics(model)

    def reference(self, windows: torch.Tensor) -> torch.Tensor:
        """The last hidden states of the compared positions with the reference cache (fp16). windows: [windows, tokens
        + 1]."""
        return self._hidden(windows[:, :-1], self.reference_scheme, self.statistics)

    @torch.inference_mode()
    def measure(self, windows: torch.Tensor, reference: torch.Tensor, scheme: Scheme) -> Measured:
        hidden = self._hidden(windows[:, :-1], scheme, self.statistics)
        targets = windows[:, self.step :: self.step].to(hidden.device)
        parts = list(self._measure_rows(hidden, reference, targets))
        columns = (torch.cat(column).view(targets.shape).double().cpu().numpy() for column in zip(*parts, strict=True))
        kl, nll, nll_fp16, same = columns
        return Measured(kl, nll, nll_fp16, same, self.step)

    def _measure_rows(
        self, hidden: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        head = self.model.lm_head
        flat, flat_reference, flat_targets = hidden.flatten(0, 1), reference.flatten(0, 1), targets.flatten()
        at_once = max(1, LOGITS_AT_ONCE // head.out_features)
        for at in range(0, len(flat), at_once):
            rows = slice(at, at + at_once)
            log_q = head(flat[rows]).float().log_softmax(-1)
            log_p = head(flat_reference[rows]).float().log_softmax(-1)
            same = log_q.argmax(-1) == log_p.argmax(-1)
            wanted = flat_targets[rows, None]
            kl = (log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0)
            yield kl, -log_q.gather(1, wanted)[:, 0], -log_p.gather(1, wanted)[:, 0], same

    @torch.inference_mode()
    def _hidden(self, ids: torch.Tensor, scheme: Scheme, statistics: list[LayerStatistics]) -> torch.Tensor:
        HOOK.view, HOOK.policy = scheme.viewer(statistics), scheme.policy
        device = next(self.model.parameters()).device
        parts = ids.to(device).split(self.batch)
        rows = slice(self.step - 1, None, self.step)
        return torch.cat([self.model.model(part, use_cache=False).last_hidden_state[:, rows] for part in parts])


def _no_statistics(model: PreTrainedModel) -> list[LayerStatistics]:
    nothing = torch.zeros(0)
    return [LayerStatistics(nothing, nothing, nothing, nothing) for _ in model.model.layers]


def _round(value: float) -> float:
    return float(f"{float(value):.4g}")
