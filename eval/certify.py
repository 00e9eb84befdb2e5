"""Certify an engine in one go: `python -m eval.certify --model smollm2-135m --kv int4 [--quick]`.

Calibrates and builds what is missing, evaluates against the fp16 twin, judges, signs, and lays certificate.json beside
the engine (where `make serve` reads it) and beside the report. The last line of stdout is the certificate's verdict and
the report's summary as one JSON object. Exit codes: 0 passed, 1 failed, 2 an error.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence

from rich.console import Console

from eval.config import load_plan
from eval.evaluate import EvalRequest, evaluate
from eval.subjects import check_request, require_engine
from eval.terminal import print_certificate, print_report
from eval.verdict import certificate_body
from nibble.certificate import Certificate, sign_body, write_certificate
from nibble.errors import NibbleError
from nibble.manifest import read_manifest
from nibble.paths import REPOSITORY_ROOT
from nibble.stage import console, run_stage

FAILED = 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Certify from the command line; exits with 1 when the engine failed. NibbleError for bad input."""
    options = _parser().parse_args(arguments)
    plan = load_plan("quick" if options.quick else options.plan, windows=options.windows, seed=options.seed)
    request = EvalRequest(options.model, options.kv, plan, options.served)
    check_request(options.model, options.kv, plan)
    build(options.model, options.kv)
    certificate, summary = certify(request, Console(stderr=True))
    print(json.dumps({"verdict": certificate.body.verdict, **summary}), flush=True)
    if certificate.body.verdict != "passed":
        sys.exit(FAILED)


def build(model: str, kv: str) -> None:
    """Bring the engine up to date, calibration included. NibbleError when the build fails."""
    command = [sys.executable, "-m", "build.run", "--model", model, "--kv", kv]
    if subprocess.run(command, cwd=REPOSITORY_ROOT, check=False).returncode:
        raise NibbleError(f"engine {model} {kv}: its build failed, see above; run: make engine MODEL={model} KV={kv}")


def certify(request: EvalRequest, progress: Console) -> tuple[Certificate, dict[str, object]]:
    """Evaluate, judge, sign and store; returns the certificate and the report's summary. NibbleError for bad input."""
    engine = require_engine(request.model, request.kv)
    report, folder = evaluate(request, progress)
    certificate = sign_body(certificate_body(report, read_manifest(engine).kv.recipe.certificate))
    write_certificate(folder, certificate)
    path = write_certificate(engine, certificate)
    print_report(report, console)
    print_certificate(certificate, console)
    console.print(f"report: {folder / 'report.html'}\ncertificate: {path}", soft_wrap=True, markup=False)
    return certificate, report.summary.model_dump()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval.certify", description="Evaluate an engine and sign the result."
    )
    parser.add_argument("--model", default="smollm2-135m", help="model recipe, folder or hub id")
    parser.add_argument("--kv", default="int4", help="KV recipe")
    parser.add_argument("--quick", action="store_true", help="the plan recipes/eval/quick.yaml instead of full.yaml")
    parser.add_argument("--plan", default="full", help="a plan of recipes/eval: full, quick, long")
    parser.add_argument("--windows", type=int, help="how many windows of text")
    parser.add_argument("--seed", type=int, help="decides windows, prompts and bootstrap samples")
    parser.add_argument(
        "--served", action=argparse.BooleanOptionalAction, default=True, help="also ask a served endpoint"
    )
    return parser


if __name__ == "__main__":
    run_stage(main)
