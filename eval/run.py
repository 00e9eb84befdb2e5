"""Compare a quantized engine with its fp16 twin: `python -m eval.run --model smollm2-135m --kv int4 --quick`.

Both engines read the same windows of real text through their caches; the report says what the quantized cache costs in
quality, and what it gives in memory and speed. Progress goes to stderr, tables to stdout; the last line of stdout is
the report's summary as one JSON object. Exit codes: 0 done, 1 done but a check failed, 2 an error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from eval.config import load_plan
from eval.evaluate import EvalRequest, evaluate
from eval.records import Report
from eval.terminal import print_report
from nibble.stage import console, run_stage

CHECK_FAILED = 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Run an evaluation from the command line; exits with 1 when a check failed. NibbleError for bad input."""
    options = _parser().parse_args(arguments)
    report, folder = evaluate(_request(options), Console(stderr=True))
    print_report(report, console)
    console.print(f"report: {folder / 'report.html'}", soft_wrap=True, markup=False)
    failures = failed_checks(report, options.max_kl_mean)
    for failure in failures:
        console.print(f"failed: {failure}", style="bold red", markup=False)
    print(report.summary.model_dump_json(), flush=True)
    if failures:
        sys.exit(CHECK_FAILED)


def failed_checks(report: Report, max_kl_mean: float | None) -> list[str]:
    """What makes a finished evaluation fail: a served endpoint without the same answer, a mean KL above the bound."""
    failures = []
    if report.served.outcome in ("different", "failed"):
        failures.append(f"served endpoint: {report.served.outcome}: {report.served.detail}")
    if max_kl_mean is not None and report.summary.kl_mean > max_kl_mean:
        failures.append(f"mean KL: got {report.summary.kl_mean:.5f}, allowed at most {max_kl_mean}")
    return failures


def _request(options: argparse.Namespace) -> EvalRequest:
    plan = load_plan(
        "quick" if options.quick else options.plan,
        windows=options.windows,
        window_tokens=options.window_tokens,
        seed=options.seed,
    )
    return EvalRequest(options.model, options.kv, plan, options.served)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m eval.run", description="Compare an engine with its fp16 twin.")
    parser.add_argument("--model", default="smollm2-135m", help="model recipe, folder or hub id")
    parser.add_argument("--kv", default="int4", help="KV recipe of a built engine")
    parser.add_argument("--quick", action="store_true", help="the plan recipes/eval/quick.yaml instead of full.yaml")
    parser.add_argument("--plan", default="full", help="a plan of recipes/eval: full, quick, long")
    parser.add_argument("--windows", type=int, help="how many windows of text")
    parser.add_argument("--window-tokens", type=int, help="tokens in a window")
    parser.add_argument("--seed", type=int, help="decides windows, prompts and bootstrap samples")
    parser.add_argument(
        "--served", action=argparse.BooleanOptionalAction, default=True, help="also ask a served endpoint"
    )
    parser.add_argument("--max-kl-mean", type=float, help="fail (exit code 1) when the mean KL is above this")
    return parser


if __name__ == "__main__":
    run_stage(main)
