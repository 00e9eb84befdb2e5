"""From a report to a verdict: every figure against the threshold of the engine's KV recipe, and where it goes wrong.

A figure is judged by the bad end of its interval where it has one, so that too small a sample can't pass by luck; the
tail (p99.9) by its value, for the interval of a tail is as wide as the sample is small. A perplexity that improves
proves nothing, so its absolute change counts. A layer that does worse than its format explains fails by itself, however
little the whole model shows of it.
"""

from __future__ import annotations

from eval.records import LayerFigures, Report
from nibble import __version__
from nibble.certificate import CertificateBody, CertifiedEngine, Figure, judge
from nibble.errors import NibbleError
from nibble.formats import PAGE_TOKENS
from nibble.recipes import CertificateRecipe


def certificate_body(report: Report, thresholds: CertificateRecipe) -> CertificateBody:
    """What a certificate of this report says. NibbleError when the report can't be one of an engine's own cache."""
    quantized, fp16 = report.engines["quantized"], report.engines["fp16"]
    if quantized.fallback_reason:
        raise NibbleError(
            f"certificate: the engine ran with an fp16 cache ({quantized.fallback_reason}); run it without"
        )
    figures = judge_report(report, thresholds)
    reasons = explain(report, figures, thresholds)
    return CertificateBody(
        schema=1,
        created=report.created,
        engine=CertifiedEngine(
            model=report.summary.model,
            kv=report.summary.kv,
            engine_hash=quantized.engine_hash,
            baseline_hash=fp16.engine_hash,
            nibble_version=__version__,
        ),
        inputs=_inputs(report),
        figures=figures,
        thresholds=thresholds,
        verdict="failed" if reasons else "passed",
        reasons=reasons,
    )


def judge_report(report: Report, thresholds: CertificateRecipe) -> list[Figure]:
    """Every figure that a certificate rests on."""
    return [*_quality(report, thresholds), *_layers(report, thresholds), *_behaviour(report, thresholds)]


def explain(report: Report, figures: list[Figure], thresholds: CertificateRecipe) -> list[str]:
    """Why the verdict is not `passed`, with the layer and the position where it starts; [] when it is."""
    reasons = [_complaint(figure) for figure in figures if not figure.passed]
    sick = [layer for layer in report.layers.layers if _is_sick(layer, thresholds)] if report.layers else []
    if sick:
        reasons.append(_locate_layer(sick, thresholds))
    if reasons and (bucket := next((b for b in report.quality.buckets if b.kl.mean > thresholds.kl_mean), None)):
        reasons.append(
            f"KL is first past its threshold at positions {bucket.start} to {bucket.end}: {bucket.kl.mean:.3g}"
        )
    if report.served.outcome in ("different", "failed"):
        reasons.append(f"served endpoint: {report.served.outcome}: {report.served.detail}")
    return reasons


def _quality(report: Report, thresholds: CertificateRecipe) -> list[Figure]:
    quality = report.quality
    sample = {"samples": quality.positions, "unit": "positions"}
    kl, top1, change = quality.kl_mean, quality.top1_agreement, quality.ppl_delta_pct
    tail = quality.kl_p999.interval if quality.kl_p999 else None
    ends = change.interval or [change.value]
    return [
        judge(
            "mean KL", kl.value, thresholds.kl_mean, "at most",
            judged=(kl.interval or [kl.value])[-1], interval=kl.interval, **sample,
        ),
        judge("p99.9 KL", quality.kl.p999, thresholds.kl_p999, "at most", interval=tail, **sample),
        judge(
            "top-1 agreement", top1.value, thresholds.top1_agreement, "at least",
            judged=(top1.interval or [top1.value])[0], interval=top1.interval, **sample,
        ),
        judge(
            "perplexity change, %", abs(change.value), thresholds.ppl_change_pct, "at most",
            judged=max(abs(end) for end in ends), interval=change.interval, **sample,
        ),
    ]  # fmt: skip


def _layers(report: Report, thresholds: CertificateRecipe) -> list[Figure]:
    if report.layers is None:
        return []
    layers = report.layers.layers
    sample = {"samples": len(layers), "unit": "layers", "interval": None}
    judged = [
        ("layer error ratio", max(layer.ratio for layer in layers), thresholds.layer_error_ratio),
        ("layer clipped share", max(layer.clipped for layer in layers), thresholds.clipped_share),
        ("stored error, half steps", max(layer.stored_error for layer in layers), thresholds.stored_error),
    ]
    return [judge(name, value, threshold, "at most", **sample) for name, value, threshold in judged]


def _behaviour(report: Report, thresholds: CertificateRecipe) -> list[Figure]:
    """Needles and tasks fail when they are worse beyond doubt: with few of them, one flip is no proof."""
    figures = []
    needle = report.needle
    if needle is not None and needle.drop is not None:
        interval = needle.drop.interval
        figures.append(
            judge(
                "needle recall lost", needle.drop.value, thresholds.needle_drop, "at most",
                judged=(interval or [needle.drop.value])[0], interval=interval, samples=needle.scored, unit="cells",
            )
        )  # fmt: skip
    for task in report.tasks:
        lost = -task.difference.value
        errors = lost / task.standard_error if task.standard_error else 0.0
        figures.append(
            judge(
                f"{task.task} lost, std. errors", errors, thresholds.task_drop_errors, "at most",
                interval=None, samples=task.documents, unit="documents",
            )
        )  # fmt: skip
    return figures


def _is_sick(layer: LayerFigures, thresholds: CertificateRecipe) -> bool:
    return (
        layer.ratio > thresholds.layer_error_ratio
        or layer.clipped > thresholds.clipped_share
        or layer.stored_error > thresholds.stored_error
    )


def _locate_layer(sick: list[LayerFigures], thresholds: CertificateRecipe) -> str:
    first = sick[0]
    pages = (first.page_ratios, thresholds.layer_error_ratio), (first.stored_errors, thresholds.stored_error)
    wrong = [at for errors, allowed in pages for at, error in enumerate(errors) if error > allowed]
    position = first.first_position + PAGE_TOKENS * min(wrong, default=0)
    others = f" and {len(sick) - 1} more" if len(sick) > 1 else ""
    where = f"layer {first.layer} ({first.format}){others}, at position {position}"
    error = f"attention error {first.error:.3g}, {first.ratio:.1f} times what the format explains"
    stored = f"stored values off by up to {first.stored_error:.1f} half steps"
    return f"it starts in {where}: {error}; {stored}; {first.clipped:.2%} of values outside static scales"


def _complaint(figure: Figure) -> str:
    end = "" if figure.judged == figure.value else f" (its interval reaches {figure.judged:.4g})"
    return f"{figure.name}: got {figure.value:.4g}{end}, allowed {figure.relation} {figure.threshold:g}"


def _inputs(report: Report) -> dict[str, str]:
    inputs = {"windows": report.inputs.sha256, "code": report.environment.code_sha256}
    inputs |= {f"text {text.name}": text.sha256 for text in report.inputs.texts}
    if report.layers is not None:
        inputs["layer text"] = report.layers.sha256
    if report.needle is not None:
        inputs["needles"] = report.needle.sha256
    return inputs | {f"task {task.task}": task.sha256 for task in report.tasks}
