"""Collects the ranges of K and V with nvidia-modelopt.

ModelOpt puts a quantizer before the attention function of every layer, where K is already rotated by RoPE and the
heads are not repeated yet. `RangeCalibrator` is plugged into the k and v quantizers through ModelOpt's own extension
point. It keeps minimum and maximum of each channel. ModelOpt's affine bias (their midrange) and amax do not give them
exactly: the amax is taken around a midrange that still moves. All other quantizers are off: the model runs unquantized.

Importing modelopt takes seconds: import this module late.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import modelopt.torch.quantization as mtq
    from modelopt.torch.quantization.calib.calibrator import _Calibrator

from calibrate.ranges import ChannelRange, check_finite
from nibble.calibration import TENSORS
from nibble.errors import NibbleError

HEADS_AND_CHANNELS = (1, 3)  # the axes of [batch, kv_head, token, channel] that each keep their own range

RangeKey = tuple[int, str]  # layer, "k" or "v"


class RangeCalibrator(_Calibrator):
    """A ModelOpt calibrator (collect, reset, compute_amax) that keeps the range of each channel."""

    def __init__(self, num_bits: int = 8, axis: tuple[int, ...] = HEADS_AND_CHANNELS, unsigned: bool = False) -> None:
        super().__init__(num_bits, axis, unsigned)
        self.owner = "a layer"
        self.channels: ChannelRange | None = None

    def collect(self, x: torch.Tensor) -> None:
        """Widen the range by x [batch, kv_heads, tokens, channels]. Raises NibbleError at NaN or Inf."""
        new = ChannelRange.of(x)
        check_finite(new, self.owner)
        self.channels = new if self.channels is None else self.channels.union(new)

    def reset(self) -> None:
        self.channels = None

    def compute_amax(self) -> torch.Tensor | None:
        return None if self.channels is None else self.channels.absmax[None, :, None, :]


KV_RANGES_ONLY = {
    "quant_cfg": [
        {"quantizer_name": "*", "enable": False},
        {
            "quantizer_name": "*[kv]_bmm_quantizer",
            "cfg": {
                "num_bits": 8,
                "axis": HEADS_AND_CHANNELS,
                "calibrator": (RangeCalibrator, (8, HEADS_AND_CHANNELS, False), {}),
            },
        },
    ],
    "algorithm": "max",
}


class RangeCollector:
    """The calibrators of a prepared model, by layer and tensor."""

    def __init__(self, model: nn.Module, num_layers: int) -> None:
        self._model = model
        self._calibrators = _find_calibrators(model)
        missing = sorted({(layer, t) for layer in range(num_layers) for t in TENSORS} - set(self._calibrators))
        if missing:
            layer, tensor = missing[0]
            raise NibbleError(
                f"calibration: layer {layer}: no attention whose {tensor.upper()} can be reached in "
                f"{type(model).__name__} ({len(missing)} of {num_layers * len(TENSORS)} are missing); allowed models "
                "whose attention goes through transformers' attention interface"
            )

    def run(self, token_ids: list[int]) -> None:
        """Run one prompt, unpadded and alone, and widen every range by it."""
        backbone = getattr(self._model, "base_model", self._model)  # without the vocabulary head
        device = next(self._model.parameters()).device
        backbone(input_ids=torch.tensor([token_ids], device=device), use_cache=False)

    def ranges(self) -> dict[RangeKey, ChannelRange]:
        """What was collected. Raises NibbleError naming a layer that no prompt reached."""
        collected = {}
        for key, calibrator in sorted(self._calibrators.items()):
            if calibrator.channels is None:
                raise NibbleError(f"calibration: {calibrator.owner}: attention was never called; nothing was collected")
            collected[key] = calibrator.channels
        return collected

    def restore(self, ranges: dict[RangeKey, ChannelRange]) -> None:
        """Go on from ranges saved earlier."""
        for key, channels in ranges.items():
            self._calibrators[key].channels = channels


def collect_ranges(model: nn.Module, num_layers: int, loop: Callable[[RangeCollector], None]) -> None:
    """Let ModelOpt calibrate `model` (changed in place) with `loop` running the prompts."""
    with _quiet(), torch.inference_mode():
        mtq.quantize(model, KV_RANGES_ONLY, lambda prepared: loop(RangeCollector(prepared, num_layers)))


def _find_calibrators(model: nn.Module) -> dict[RangeKey, RangeCalibrator]:
    found: dict[RangeKey, RangeCalibrator] = {}
    for attention in model.modules():
        for tensor in TENSORS:
            calibrator = getattr(getattr(attention, f"{tensor}_bmm_quantizer", None), "_calibrator", None)
            if isinstance(calibrator, RangeCalibrator):
                layer = int(attention.layer_idx)  # type: ignore[arg-type]  # every transformers attention has it
                calibrator.owner = f"layer {layer} {tensor.upper()}"
                found[layer, tensor] = calibrator
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """ModelOpt prints what it inserts; the progress bar goes to the real console."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
