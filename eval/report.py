"""report.html: one file that needs nothing else, for a phone or a desk, by day or by night."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from eval import plots, plots_grid
from eval.figures import comparison_rows, headings, interval_text, nats
from eval.measures import PositionMeasures
from eval.records import Report
from eval.verdict import explain, judge_report
from nibble.recipes import CertificateRecipe

TEMPLATE = "report.html.j2"


def render_html(
    report: Report,
    measured: list[PositionMeasures],
    others: list[Report] | None = None,
    thresholds: CertificateRecipe | None = None,
) -> str:
    """The page as text.

    measured: every window's positions, for the plots. others: runs of the model's formats. thresholds: judge by these.
    """
    judged = judge_report(report, thresholds) if thresholds else []
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template(TEMPLATE).render(
        r=report,
        s=report.summary,
        q=report.quality,
        cards=_cards(report),
        plots=_plots(report, measured, others or []),
        nats=nats,
        interval_text=interval_text,
        headings=headings(report),
        comparison=comparison_rows(report),
        provenance=_provenance(report),
        judged=judged,
        reasons=explain(report, judged, thresholds) if thresholds else [],
    )


def _cards(report: Report) -> list[dict[str, str]]:
    summary, memory = report.summary, report.memory
    smaller = summary.bytes_per_token_fp16 / summary.bytes_per_token
    smaller_now = memory.fp16.bytes_per_token / memory.quantized.bytes_per_token
    return [
        _card("mean KL to fp16", nats(summary.kl_mean), f"nats; p99.9 {nats(summary.kl_p999)}"),
        _card("same top token", f"{summary.top1_agreement:.2%}", "of positions"),
        _card("perplexity", f"{summary.ppl_delta_pct:+.2f} %", f"{summary.ppl_fp16:.2f} to {summary.ppl:.2f}"),
        _card("sealed cache", f"÷ {smaller:.2f}", f"{summary.bytes_per_token:,.0f} bytes a token"),
        _card("whole cache", f"÷ {smaller_now:.2f}", f"at {memory.quantized.tokens:,} tokens, fp16 pages too"),
        _card("decode", f"{summary.decode_tokens_per_s:.1f} tok/s", f"fp16 {summary.decode_tokens_per_s_fp16:.1f}"),
    ]


def _card(label: str, figure: str, note: str) -> dict[str, str]:
    return {"label": label, "figure": figure, "note": note}


def _plots(report: Report, measured: list[PositionMeasures], others: list[Report]) -> list[dict[str, str]]:
    drawn: tuple[tuple[str, str], ...] = (
        (
            plots.kl_by_position(measured),
            "KL by position, a point for every 64 tokens. Sinks and the newest pages are fp16.",
        ),
        (plots.kl_distribution(measured), "How often KL exceeds a value. The tail is what a user notices."),
        (plots.memory_by_length(report), "One sequence's cache, fp16 pages included. Dots: counted in the allocator."),
        (plots.loss_changes(measured), "How much the loss of every position changed, over its loss with fp16."),
    )
    drawn += tuple(_grid_plots(report, others))
    return [{"svg": svg, "caption": caption} for svg, caption in drawn]


def _grid_plots(report: Report, others: list[Report]) -> Iterator[tuple[str, str]]:
    kv = report.summary.kv
    if report.layers is not None:
        text = f"Each layer by itself over {report.layers.tokens:,} tokens. 1: the cache does what its format says."
        yield plots_grid.layer_ratios(report.layers), text
    if report.needle is not None:
        for variant, svg in plots_grid.needle_maps(report.needle, kv):
            yield (
                svg,
                f"Needles, {variant}: share of the numbers found, by depth and length. Only where fp16 finds all.",
            )
    yield plots_grid.latency_by_streams(report), "Latency against concurrency: what a stream waits for its next token."
    together = [other for other in others if other.summary.kv != kv] + [report]
    yield (
        plots_grid.cost_against_memory(together),
        "What each format costs and takes: the newest run of each, and this one.",
    )


def _provenance(report: Report) -> list[tuple[str, str]]:
    plan, environment = report.plan, report.environment
    return [
        ("plan", f"{plan.name}: {plan.windows} windows of {plan.window_tokens:,} tokens, seed {plan.seed}"),
        *((f"engine {name}", f"{engine.kv}, {engine.engine_hash}") for name, engine in report.engines.items()),
        ("windows", report.inputs.sha256),
        *((text.name, f"{text.windows} windows, {text.sha256}") for text in report.inputs.texts),
        ("code", environment.code_sha256),
        ("commit", environment.commit),
        *((package, number) for package, number in environment.versions.items()),
        *((name, str(value)) for name, value in environment.machine.items()),
        ("took", f"{report.seconds:.0f} s"),
    ]
