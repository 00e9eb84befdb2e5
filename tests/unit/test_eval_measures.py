"""The measures against closed forms, and every way in which a broken engine must be seen."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from eval.compare import compare_window
from eval.measures import PositionMeasures, measure_positions
from eval.windows import Window
from nibble.errors import NibbleError

VOCAB = 11


class Scripted:
    """An engine whose logits are given, in chunks of a given size."""

    def __init__(self, logits: torch.Tensor, chunk: int = 7) -> None:
        self._logits, self._chunk = logits, chunk

    def logits(self, token_ids: list[int]) -> Iterator[torch.Tensor]:
        yield from self._logits[: len(token_ids)].split(self._chunk)


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(0)) * 4


@pytest.fixture
def window() -> Window:
    return Window("text", 0, tuple(range(VOCAB)) * 3 + tuple(range(8)))


def test_kl_of_two_outcomes_is_the_closed_form() -> None:
    p, q = 0.8, 0.3
    fp16, quantized = (torch.tensor([[math.log(x), math.log(1 - x)]]) for x in (p, q))
    measured = measure_positions(fp16, quantized, torch.tensor([1]))
    assert measured.kl[0] == pytest.approx(p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)), rel=1e-6)
    assert measured.nll[0] == pytest.approx(-math.log(1 - q), rel=1e-6)
    assert measured.nll_fp16[0] == pytest.approx(-math.log(1 - p), rel=1e-6)
    assert not measured.top1_same[0]


def test_measures_equal_numpy_in_float64(logits: torch.Tensor) -> None:
    quantized = logits + 0.01 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    targets = torch.arange(len(logits)) % VOCAB
    measured = measure_positions(logits, quantized, targets)
    log_p, log_q = (_log_softmax(x.double().numpy()) for x in (logits, quantized))
    rows = np.arange(len(logits))
    np.testing.assert_allclose(measured.kl, (np.exp(log_p) * (log_p - log_q)).sum(1), atol=1e-14)
    np.testing.assert_allclose(measured.nll, -log_q[rows, targets], rtol=1e-12)
    np.testing.assert_array_equal(measured.top1_same, log_p.argmax(1) == log_q.argmax(1))


def test_a_tiny_kl_is_not_lost_in_rounding() -> None:
    """Two outcomes apart by e: KL is p (1 - p) e^2 / 2 to leading order, here far below float32's step at 1."""
    shift = 1e-5
    fp16 = torch.tensor([[20.0, 19.0]], dtype=torch.float64)
    quantized = fp16 + torch.tensor([[shift, 0.0]], dtype=torch.float64)
    p = 1 / (1 + math.exp(-1))
    measured = measure_positions(fp16, quantized, torch.tensor([0]))
    assert measured.kl[0] == pytest.approx(p * (1 - p) * shift**2 / 2, rel=1e-3)


@pytest.mark.parametrize("shift", [0.0, 3.0, -100.0])
def test_a_constant_added_to_all_logits_changes_nothing(logits: torch.Tensor, shift: float) -> None:
    measured = measure_positions(logits, logits + shift, torch.zeros(len(logits), dtype=torch.long))
    assert measured.kl.max() < 1e-9
    assert measured.top1_same.all()


@pytest.mark.parametrize(("fp16_chunk", "quantized_chunk"), [(7, 7), (7, 3), (1, 40), (40, 16)])
def test_chunk_sizes_do_not_matter(logits: torch.Tensor, window: Window, fp16_chunk: int, quantized_chunk: int) -> None:
    quantized = logits.flip(1)
    measured = compare_window(Scripted(logits, fp16_chunk), Scripted(quantized, quantized_chunk), window, 0)
    expected = measure_positions(logits, quantized, torch.tensor(window.next_tokens))
    np.testing.assert_array_equal(measured.kl, expected.kl)
    np.testing.assert_array_equal(measured.nll, expected.nll)


def test_progress_adds_up_to_the_window(logits: torch.Tensor, window: Window) -> None:
    advanced: list[int] = []
    compare_window(Scripted(logits, 7), Scripted(logits, 5), window, 0, advanced.append)
    assert sum(advanced) == len(window.inputs)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("engine", ["fp16", "quantized"])
def test_a_logit_that_is_no_number_names_engine_window_and_position(
    logits: torch.Tensor, window: Window, value: float, engine: str
) -> None:
    broken = logits.clone()
    broken[23, 4] = value
    fp16, quantized = (broken, logits) if engine == "fp16" else (logits, broken)
    with pytest.raises(NibbleError, match=rf"{engine} engine.*window 5, position 23"):
        compare_window(Scripted(fp16), Scripted(quantized), window, 5)


def test_missing_positions_are_an_error(logits: torch.Tensor, window: Window) -> None:
    with pytest.raises(NibbleError, match="window 2: got 39 positions, allowed exactly 40"):
        compare_window(Scripted(logits), Scripted(logits[:39]), window, 2)


def test_another_vocabulary_is_an_error(logits: torch.Tensor, window: Window) -> None:
    with pytest.raises(NibbleError, match="same model"):
        compare_window(Scripted(logits), Scripted(logits[:, :-1]), window, 0)


def test_no_parts_are_no_positions() -> None:
    assert len(PositionMeasures.concatenate([])) == 0


def _log_softmax(values: np.ndarray) -> np.ndarray:
    shifted = values - values.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
