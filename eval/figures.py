"""The comparison as rows of words, the same for the terminal and for report.html."""

from __future__ import annotations

from eval.records import Estimate, Report

Row = tuple[str, str, str, str, str]
SPEED_FIGURES = (
    ("prefill tokens/s", "prefill_tokens_per_s"),
    ("decode tok/s, 1 stream", "decode_tokens_per_s"),
    ("decode tok/s, {streams} streams", "decode_tokens_per_s_streams"),
)


def headings(report: Report) -> Row:
    """What the columns of `comparison_rows` are."""
    return "measure", report.summary.kv, "fp16", "change", "95 % interval"


def comparison_rows(report: Report) -> list[Row]:
    """Quality, memory and speed; a cell is empty where it would say nothing."""
    return [*_quality_rows(report), *_behaviour_rows(report), *_memory_rows(report), *_speed_rows(report)]


def nats(value: float) -> str:
    """A KL in three significant digits: formats differ by orders of magnitude."""
    return f"{value:.3g}"


def _quality_rows(report: Report) -> list[Row]:
    quality = report.quality
    top1, change = quality.top1_agreement, quality.ppl_delta_pct
    return [
        ("KL to fp16 (nats), mean", nats(quality.kl.mean), "", "", interval_text(quality.kl_mean, ".2g")),
        ("KL, median", nats(quality.kl.p50), "", "", ""),
        ("KL, p99", nats(quality.kl.p99), "", "", ""),
        ("KL, p99.9", nats(quality.kl.p999), "", "", interval_text(quality.kl_p999, ".2g")),
        ("same top token", f"{top1.value:.2%}", "", "", interval_text(top1, ".1%")),
        (
            "perplexity (token)",
            f"{quality.ppl:.3f}",
            f"{quality.ppl_fp16:.3f}",
            f"{change.value:+.2f} %",
            interval_text(change, "+.2f"),
        ),
        *_word_perplexity(report),
    ]


def _word_perplexity(report: Report) -> list[Row]:
    quality = report.quality
    if quality.word_ppl is None or quality.word_ppl_fp16 is None:
        return []
    change = f"{100 * (quality.word_ppl / quality.word_ppl_fp16 - 1):+.2f} %"
    return [("perplexity (word, as lm-eval)", f"{quality.word_ppl:.2f}", f"{quality.word_ppl_fp16:.2f}", change, "")]


def _behaviour_rows(report: Report) -> list[Row]:
    rows: list[Row] = []
    for task in report.tasks:
        same = "" if task.same_text is None else f", same text {task.same_text:.0%}"
        label = f"task {task.task}: {task.documents} documents, {task.flips} flips{same}"
        change = f"{task.difference.value:+.1%}"
        rows.append(
            (label, f"{task.accuracy:.1%}", f"{task.accuracy_fp16:.1%}", change, interval_text(task.difference, "+.1%"))
        )
    needle = report.needle
    if needle is not None and needle.recall is not None and needle.recall_fp16 is not None and needle.drop is not None:
        label = f"needle recall, {needle.scored} of {len(needle.cells)} cells scored"
        lost = needle.drop.interval
        interval = None if lost is None else [0.0 - lost[1], 0.0 - lost[0]]  # nothing lost is 0, not -0
        gained = Estimate(value=0.0 - needle.drop.value, interval=interval)
        change, shown = f"{gained.value:+.1%}", interval_text(gained, "+.1%")
        rows.append((label, f"{needle.recall:.1%}", f"{needle.recall_fp16:.1%}", change, shown))
    return rows


def _memory_rows(report: Report) -> list[Row]:
    quantized, fp16 = report.memory.quantized, report.memory.fp16
    return [
        _divided("bytes per sealed token", quantized.sealed_bytes_per_token, fp16.sealed_bytes_per_token),
        _divided(f"bytes per token at {quantized.tokens:,}", quantized.bytes_per_token, fp16.bytes_per_token),
    ]


def _speed_rows(report: Report) -> list[Row]:
    rows = []
    for label, name in SPEED_FIGURES:
        ours, theirs = getattr(report.speed.quantized, name), getattr(report.speed.fp16, name)
        label = label.format(streams=report.speed.streams)
        rows.append((label, f"{ours:,.1f}", f"{theirs:,.1f}", f"{ours / theirs:.2f} ×", ""))
    return rows + _latency_rows(report)


def _latency_rows(report: Report) -> list[Row]:
    pairs = zip(report.speed.quantized.latencies, report.speed.fp16.latencies, strict=True)
    return [
        (
            f"ms to the next token, {ours.streams} streams: p50, p99 of {ours.tokens:,}",
            f"{ours.ms_p50:,.1f}, {ours.ms_p99:,.1f}",
            f"{theirs.ms_p50:,.1f}, {theirs.ms_p99:,.1f}",
            f"{theirs.ms_p50 / ours.ms_p50:.2f} ×",
            "",
        )
        for ours, theirs in pairs
    ]


def _divided(label: str, ours: float, theirs: float) -> Row:
    return label, f"{ours:,.0f}", f"{theirs:,.0f}", f"÷ {theirs / ours:.2f}", ""


def interval_text(estimate: Estimate | None, fmt: str) -> str:
    """Both ends in a format; empty for a figure that has no interval."""
    if estimate is None:
        return ""
    if estimate.interval is None:
        return "one sample"
    low, high = estimate.interval
    return f"{low:{fmt}} to {high:{fmt}}"
