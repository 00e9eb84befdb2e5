"""Pre-flight: before anything is built, what about this model could break a quantized cache, and what is done about it.

Each finding is safe, mitigate (some layers get another format, said which) or refuse (why, and what to use instead). It
reads config.json, a few small tensors of each layer and the calibration if there is one; no model is loaded, so a 70B
takes seconds. The findings are printed and kept in the manifest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from rich.table import Table

from build.attention_weights import LayerWeights, read_attention_weights
from build.key_bias import COARSEST_STEP, INT4_LEVELS, USUAL_KEY_WIDTH, RopeSpan, find_remedy, pair_amplitudes
from nibble.architecture import Architecture, find_refusal, read_architecture
from nibble.calibration import Calibration
from nibble.errors import NibbleError
from nibble.formats import FORMATS, INT8_PAGE, KVFormat, ScaleKind
from nibble.manifest import FindingEntry, PreflightEntry
from nibble.models import read_config

Verdict = Literal["safe", "mitigate", "refuse"]
DEFAULT_THETA = 10_000.0  # transformers' own default of rope_theta
GPU_HEAD_DIMS = (64, 80, 96, 128, 192, 256)  # what the CUDA kernels are compiled for
GPU_LARGEST_GROUP = 16
LARGEST_HALF = 65504.0  # pages are fp16 before they are sealed
WIDE_CHANNEL = 8.0  # times the layer's median width: worth a line in the table, page scales take it
BIAS_REMEDY = "kept or taken off K, as scores decide,"
WEAK_QUERY = 2.0  # a usual |q| of a channel pair: below this a "large multiple of the median bias" means nothing


@dataclass
class Preflight:
    """The findings so far.

    formats: for layers that need another format than the one asked for, which and why. bias_layers: layers whose k_proj
    bias may be too large for K's scales: it is taken off K before it is stored, unless scores hardly notice it.
    """

    findings: list[FindingEntry] = field(default_factory=list)
    bias_layers: list[int] = field(default_factory=list)
    formats: dict[int, tuple[KVFormat, str]] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        verdicts = {finding.verdict for finding in self.findings}
        return "refuse" if "refuse" in verdicts else "mitigate" if "mitigate" in verdicts else "safe"

    @property
    def entry(self) -> PreflightEntry:
        return PreflightEntry(verdict=self.verdict, findings=self.findings)

    def add(self, check: str, got: str, verdict: Verdict, action: str = "", layers: list[int] | None = None) -> None:
        found = FindingEntry(check=check, got=got, verdict=verdict, action=action, layers=layers or [])
        self.findings.append(found)


def run_preflight(source: Path, formats: list[KVFormat], calibration: Calibration | None, context: int) -> Preflight:
    """Look at a model before it is built with these formats, one a layer. context: tokens of the longest sequence.

    Raises NibbleError for what can't be read. A refusal is a finding: `require_flyable` raises it.
    """
    config, result = read_config(source), Preflight()
    if refusal := find_refusal(config):
        result.add("architecture", str(config.get("model_type")), "refuse", refusal)
        return result
    architecture = read_architecture(config)
    weights = read_attention_weights(source, architecture.num_layers)
    _check_architecture(architecture, weights, result)
    if result.verdict != "refuse":
        rope = RopeSpan(architecture.rope_theta or DEFAULT_THETA, context)
        _check_key_bias(architecture, weights, formats, calibration, rope, result)
        _check_query_bias(architecture, weights, formats, result)
        _check_ranges(weights, formats, calibration, result)
    return result


def require_flyable(preflight: Preflight, model: str) -> None:
    """NibbleError with every refusal."""
    refusals = [f"{finding.check}: {finding.action}" for finding in preflight.findings if finding.verdict == "refuse"]
    if refusals:
        raise NibbleError(f"pre-flight refuses {model}: " + "; ".join(refusals))


def preflight_table(preflight: Preflight, model: str) -> Table:
    """The findings, worst last where the eye stays."""
    colours = {"safe": "green", "mitigate": "yellow", "refuse": "red"}
    table = Table(title=f"Pre-flight of {model}: {preflight.verdict}", title_justify="left")
    for heading in ("check", "found", "verdict", "what is done"):
        table.add_column(heading, overflow="fold")
    for finding in preflight.findings:
        colour = colours[finding.verdict]
        table.add_row(finding.check, finding.got, f"[{colour}]{finding.verdict}[/]", finding.action)
    return table


def _check_architecture(architecture: Architecture, weights: list[LayerWeights], result: Preflight) -> None:
    size, group = architecture.head_dim, architecture.group
    on_gpu = "" if size in GPU_HEAD_DIMS else f"runs on CPUs; CUDA kernels take {', '.join(map(str, GPU_HEAD_DIMS))}"
    result.add("head size", str(size), "safe", on_gpu)
    on_gpu = "" if group <= GPU_LARGEST_GROUP else f"runs on CPUs; CUDA kernels take up to {GPU_LARGEST_GROUP}"
    heads = f"{architecture.num_q_heads} query heads over {architecture.num_kv_heads} KV heads: {group}"
    result.add("GQA group", heads, "safe", on_gpu)
    theta = f", base {architecture.rope_theta:g}" if architecture.rope_theta else ""
    result.add("RoPE", f"{architecture.rope_kind}{theta}", "safe")
    windowed = [i for i, window in enumerate(architecture.windows) if window]
    action = "the window masks keys in every format alike" if windowed else ""
    widths = ", ".join(str(width) for width in sorted({w for w in architecture.windows if w}))
    got = f"{len(windowed)} of {architecture.num_layers} layers, {widths} tokens" if windowed else "none"
    result.add("sliding window", got, "safe", action, windowed)
    result.add("MLA, shared KV, soft cap", "none", "safe")
    if sinks := [i for i, layer in enumerate(weights) if layer.sinks]:
        action = "learned attention sinks are not supported; serve this model with an engine that has them"
        result.add("attention sinks", f"in layers {_spell(sinks)}", "refuse", action, sinks)
    normed = [i for i, layer in enumerate(weights) if layer.k_norm is not None]
    action = "bounds K's channels" if normed else "K is not bounded: biases and ranges below decide"
    result.add("QK-norm", f"{len(normed)} of {architecture.num_layers} layers", "safe", action)


def _check_key_bias(
    architecture: Architecture,
    weights: list[LayerWeights],
    formats: list[KVFormat],
    calibration: Calibration | None,
    rope: RopeSpan,
    result: Preflight,
) -> None:
    """Which layers' K a format can't resolve under its bias, and what they get instead."""
    norms = [0.0 if layer.k_bias is None else float(layer.k_bias.norm()) for layer in weights]
    if not any(norms):
        result.add("K bias", "none", "safe")
        return
    median = float(torch.tensor(norms).median())
    for index, (layer, fmt) in enumerate(zip(weights, formats, strict=True)):
        if layer.k_bias is None:
            continue
        amplitudes = pair_amplitudes(layer.k_bias, architecture.head_dim)
        remedy = find_remedy(amplitudes, fmt, _key_width(calibration, index, amplitudes), rope)
        if remedy is None:
            continue
        removable = layer.k_norm is None and fmt.k.scale is not ScaleKind.STATIC_CHANNEL
        if removable:
            result.bias_layers.append(index)
        if not removable or fmt.k.scale is ScaleKind.TOKEN:
            why = (
                f"K bias reaches {float(amplitudes.max()):.0f} in a channel pair (norm {norms[index]:.0f}, the median "
                f"layer's {median:.3g}): {fmt.name} can't resolve the other part of K"
            )
            result.formats[index] = (_page_scales(fmt) if removable or remedy.k.bits == 8 else remedy, why)
    worst = max(range(len(norms)), key=norms.__getitem__)
    got = f"norm up to {norms[worst]:.4g} (layer {worst}), median layer {median:.3g}"
    _report_remedies("K bias", got, "zero points take it", result, sorted({*result.formats, *result.bias_layers}))


def _check_query_bias(
    architecture: Architecture, weights: list[LayerWeights], formats: list[KVFormat], result: Preflight
) -> None:
    """A Q bias multiplies the error of the K channels it meets.

    One pair m times as strong as the usual one adds m^2 of the usual error, so above sqrt(head size) it outweighs all
    other channels together; K then gets 8 bits.
    """
    if all(layer.q_bias is None for layer in weights):
        result.add("Q bias", "none", "safe")
        return
    limit, strongest, hit = architecture.head_dim**0.5, 0.0, []
    for index, (layer, fmt) in enumerate(zip(weights, formats, strict=True)):
        if layer.q_bias is None:
            continue
        amplitudes = pair_amplitudes(layer.q_bias, architecture.head_dim)
        times = float(amplitudes.max()) / max(float(amplitudes.median()), WEAK_QUERY)
        strongest = max(strongest, times)
        if times > limit and fmt.k.bits < 8:
            hit.append(index)
            why = f"Q bias is {times:.0f} times the usual query in a channel pair and multiplies K's error there"
            result.formats.setdefault(index, (FORMATS["k8v4"], why))
    got = f"strongest pair {strongest:.3g} times the usual query (limit {limit:.3g})"
    _report_remedies("Q bias", got, "", result, hit)


def _report_remedies(check: str, got: str, otherwise: str, result: Preflight, layers: list[int]) -> None:
    if not layers:
        result.add(check, got, "safe", otherwise)
        return
    by_format: dict[str, list[int]] = {}
    for layer in layers:
        remedy = result.formats[layer][0].name if layer in result.formats else BIAS_REMEDY
        by_format.setdefault(remedy, []).append(layer)
    action = "; ".join(f"{name} in layers {_spell(found)}" for name, found in sorted(by_format.items()))
    result.add(check, got, "mitigate", action, layers)


def _check_ranges(
    weights: list[LayerWeights], formats: list[KVFormat], calibration: Calibration | None, result: Preflight
) -> None:
    """Ranges of K from calibration: beyond fp16 is refused, wide channels get a scale of their own."""
    if calibration is None:
        result.add("K channel ranges", "not calibrated", "safe", "measured by the self-check of the build")
        return
    widest, layer_of, beyond, hit = 0.0, 0, [], []
    for index, (layer, fmt) in enumerate(zip(weights, formats, strict=True)):
        low, high = calibration.channel_range(index, "k")
        width = high - low
        ratio = float(width.max() / width.median().clamp_min(1e-12))
        if ratio > widest:
            widest, layer_of = ratio, index
        if float(torch.maximum(low.abs(), high.abs()).max()) > LARGEST_HALF:
            beyond.append(index)
        if fmt.k.scale is ScaleKind.TOKEN and _without_bias(width, layer) * INT4_LEVELS / fmt.k.levels > COARSEST_STEP:
            hit.append(index)
            why = (
                f"K's widest channel, {ratio:.0f} times the median, sets the one scale that {fmt.name} has for a token"
            )
            result.formats.setdefault(index, (_page_scales(fmt), why))
    if beyond:
        action = f"K is beyond what fp16 pages hold (65504) in layers {_spell(beyond)}; use an engine with a bf16 cache"
        result.add("K channel ranges", "beyond fp16", "refuse", action, beyond)
        return
    otherwise = "each channel has a scale of its own" if widest > WIDE_CHANNEL else ""
    got = f"widest {widest:.3g} times the median (layer {layer_of})"
    _report_remedies("K channel ranges", got, otherwise, result, hit)


def _page_scales(fmt: KVFormat) -> KVFormat:
    """K of 8 bits with a scale for each channel of a page, and a V with as many bits as the format's."""
    return INT8_PAGE if fmt.v.bits == 8 else FORMATS["k8v4"]


def _without_bias(width: torch.Tensor, layer: LayerWeights) -> float:
    """The widest channel of K, less the wave that a bias makes in it, over the median one. width: [heads, D]."""
    median = width.median().clamp_min(1e-12)
    if layer.k_bias is not None:
        width = width - 2 * pair_amplitudes(layer.k_bias, width.shape[-1]).to(width).repeat(1, 2)
    return float(width.max() / median)


def _key_width(calibration: Calibration | None, layer: int, amplitudes: torch.Tensor) -> float:
    """The usual width of a K channel without its bias; calibrated ranges hold the bias' wave, so it is taken off."""
    if calibration is None:
        return USUAL_KEY_WIDTH
    low, high = calibration.channel_range(layer, "k")
    wave = 2 * amplitudes.to(high).repeat(1, 2)
    return max(float((high - low - wave).clamp_min(0).median()), 1e-3)


def _spell(layers: list[int]) -> str:
    return ", ".join(map(str, layers))
