"""The report as tables for the terminal: every figure of the quantized cache beside the fp16 one."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eval.figures import comparison_rows, headings, interval_text, nats
from eval.records import Report
from nibble.certificate import Certificate

OUTCOME_STYLES = {"same": "green", "different": "bold red", "failed": "bold red", "skipped": "yellow"}


def print_report(report: Report, console: Console) -> None:
    """Print the comparison, KL by position and the served check."""
    console.print(_comparison(report))
    console.print(_buckets(report))
    style = OUTCOME_STYLES[report.served.outcome]
    console.print(f"[{style}]served endpoint: {report.served.outcome}[/] ({escape(report.served.detail)})")


def print_certificate(certificate: Certificate, console: Console) -> None:
    """Print every figure beside its threshold, the verdict and its reasons."""
    body = certificate.body
    table = Table(title=f"Certificate of {body.engine.model} {body.engine.kv}", box=SIMPLE_HEAD)
    for number, heading in enumerate(("figure", "value", "95 % interval", "threshold", "samples", "")):
        table.add_column(heading, justify="right" if number else "left")
    for figure in body.figures:
        low, high = figure.interval or (None, None)
        interval = "" if low is None else f"{low:.3g} to {high:.3g}"
        mark = "[green]ok[/]" if figure.passed else "[bold red]past it[/]"
        allowed = f"{figure.relation} {figure.threshold:g}"
        table.add_row(figure.name, f"{figure.value:.4g}", interval, allowed, f"{figure.samples:,} {figure.unit}", mark)
    console.print(table)
    style = "bold green" if body.verdict == "passed" else "bold red"
    console.print(f"[{style}]certification {body.verdict}[/], key {certificate.signature.fingerprint}")
    for reason in body.reasons:
        console.print(f"  {reason}", style="red", markup=False, soft_wrap=True)


def _comparison(report: Report) -> Table:
    summary = report.summary
    title = (
        f"{summary.model}, KV {summary.kv} against fp16: {summary.tokens:,} positions in {report.plan.windows} windows"
    )
    table = Table(title=title, box=SIMPLE_HEAD)
    for number, heading in enumerate(headings(report)):
        table.add_column(heading, justify="right" if number else "left")
    for row in comparison_rows(report):
        table.add_row(*row)
    return table


def _buckets(report: Report) -> Table:
    table = Table(title="By position in the window", box=SIMPLE_HEAD)
    for heading in ("positions", "sampled", "KL mean", "95 % interval", "KL p99.9", "same top token", "perplexity"):
        table.add_column(heading, justify="right")
    for bucket in report.quality.buckets:
        table.add_row(
            f"{bucket.start:,} to {bucket.end:,}",
            f"{bucket.positions:,}",
            nats(bucket.kl.mean),
            interval_text(bucket.kl_mean, ".2g"),
            nats(bucket.kl.p999),
            f"{bucket.top1_agreement:.2%}",
            f"{bucket.ppl_delta_pct:+.2f} %",
        )
    return table
