"""The comparison as rows of words, the same for the terminal and for report.html."""

from __future__ import annotations

from eval.records import Estimate, Report

Row = tuple[str, str, str, str]
SPEED_FIGURES = (
    ("prefill tokens/s", "prefill_tokens_per_s"),
    ("decode tokens/s, 1 stream", "decode_tokens_per_s"),
    ("decode tokens/s, {streams} streams", "decode_tokens_per_s_streams"),
)


def comparison_rows(report: Report) -> list[Row]:
    """(measure, quantized, fp16, change) for quality, memory and speed."""
    return [*_quality_rows(report), *_memory_rows(report), *_speed_rows(report)]


def with_interval(estimate: Estimate, fmt: str) -> str:
    """`value (low to high)`; the value alone when there was one window."""
    if estimate.interval is None:
        return f"{estimate.value:{fmt}}"
    low, high = estimate.interval
    return f"{estimate.value:{fmt}} ({low:{fmt}} to {high:{fmt}})"


def _quality_rows(report: Report) -> list[Row]:
    quality = report.quality
    return [
        ("KL to fp16, mean (nats)", with_interval(quality.kl_mean, ".5f"), "", ""),
        ("KL p50 / p99 / p99.9", f"{quality.kl.p50:.5f} / {quality.kl.p99:.4f} / {quality.kl.p999:.4f}", "", ""),
        ("same top token", with_interval(quality.top1_agreement, ".2%"), "", ""),
        (
            "perplexity (token)",
            f"{quality.ppl:.3f}",
            f"{quality.ppl_fp16:.3f}",
            with_interval(quality.ppl_delta_pct, "+.2f") + " %",
        ),
    ]


def _memory_rows(report: Report) -> list[Row]:
    quantized, fp16 = report.memory.quantized, report.memory.fp16
    return [
        _smaller("bytes per sealed token", quantized.sealed_bytes_per_token, fp16.sealed_bytes_per_token),
        _smaller(f"bytes per token at {quantized.tokens:,}", quantized.bytes_per_token, fp16.bytes_per_token),
    ]


def _speed_rows(report: Report) -> list[Row]:
    rows = []
    for label, name in SPEED_FIGURES:
        ours, theirs = getattr(report.speed.quantized, name), getattr(report.speed.fp16, name)
        label = label.format(streams=report.speed.streams)
        rows.append((label, f"{ours:,.1f}", f"{theirs:,.1f}", f"{ours / theirs:.2f} x"))
    return rows


def _smaller(label: str, ours: float, theirs: float) -> Row:
    return label, f"{ours:,.0f}", f"{theirs:,.0f}", f"{theirs / ours:.2f} x smaller"
