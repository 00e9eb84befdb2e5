"""Past evaluations: list them, open one, put any two beside each other, print the report's schema.

python -m eval.runs list [--model M] [--kv KV]
python -m eval.runs show results/smollm2-135m/int4/latest
python -m eval.runs compare results/smollm2-135m/int4/latest results/smollm2-135m/int8/latest
python -m eval.runs schema
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import ValidationError
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from eval.figures import comparison_rows, nats
from eval.records import Report
from eval.results import results_root
from eval.statistics import bootstrap_interval
from eval.terminal import print_report
from nibble.certificate import CERTIFICATE_FILE
from nibble.errors import NibbleError
from nibble.stage import console, run_stage

REPORT_FILE = "report.json"


def find_runs(root: Path, model: str | None = None, kv: str | None = None) -> list[Path]:
    """The folders of stored runs, oldest first; `latest` links are not runs."""
    found = root.glob(f"{model or '*'}/{kv or '*'}/*/{REPORT_FILE}")
    return sorted((path.parent for path in found if not path.parent.is_symlink()), key=lambda folder: folder.name)


def read_report(folder: Path) -> Report:
    """The report of a run. NibbleError when there is none or it can't be read."""
    path = folder / REPORT_FILE
    try:
        return Report.model_validate_json(path.read_text(encoding="utf-8"), strict=False)
    except FileNotFoundError as error:
        raise NibbleError(f"{path}: no run there; see them with: python -m eval.runs list") from error
    except (OSError, ValidationError) as error:
        raise NibbleError(f"{path}: can't be read as a report: {error}") from error


def latest_reports(root: Path, model: str) -> list[Report]:
    """The newest readable run of every KV format of a model."""
    newest: dict[str, Report] = {}
    for folder in find_runs(root, model):
        try:
            report = read_report(folder)
        except NibbleError:
            continue  # of an older version: it can't be compared
        newest[report.summary.kv] = report
    return list(newest.values())


def list_runs(root: Path, model: str | None, kv: str | None, output: Console) -> None:
    """A table of all runs."""
    table = Table(title=f"Evaluations under {root}", box=SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(("run", "plan", "KL mean", "same top", "verdict")):
        table.add_column(heading, justify="right" if number > 1 else "left", no_wrap=number != 1)
    for folder in find_runs(root, model, kv):
        name = str(folder.relative_to(root))
        try:
            report = read_report(folder)
        except NibbleError:
            table.add_row(name, "not readable by this version", "", "", "")
            continue
        s = report.summary
        verdict = ""
        if (folder / CERTIFICATE_FILE).is_file():
            verdict = json.loads((folder / CERTIFICATE_FILE).read_text(encoding="utf-8"))["body"]["verdict"]
        table.add_row(name, report.plan.name, nats(s.kl_mean), f"{s.top1_agreement:.2%}", verdict)
    output.print(table)


def compare_runs(first: Report, second: Report, output: Console) -> None:
    """Both runs' figures side by side; paired over windows where both read the same ones."""
    names = [f"{report.summary.model} {report.summary.kv}" for report in (first, second)]
    table = Table(title=f"{names[0]} beside {names[1]}", box=SIMPLE_HEAD)
    for number, heading in enumerate(("measure", *names)):
        table.add_column(heading, justify="right" if number else "left")
    right = {row[0]: row[1] for row in comparison_rows(second)}
    for row in comparison_rows(first):
        table.add_row(row[0], row[1], right.pop(row[0], ""))
    for label, value in right.items():
        table.add_row(label, "", value)
    output.print(table)
    output.print(paired_kl(first, second), markup=False, soft_wrap=True)


def paired_kl(first: Report, second: Report) -> str:
    """The difference of mean KL over the windows that both runs read, in words."""
    ours = {window.sha256: window.kl_mean for window in first.quality.per_window}
    theirs = {window.sha256: window.kl_mean for window in second.quality.per_window}
    shared = sorted(ours.keys() & theirs.keys())
    if len(shared) < 2:
        return f"{len(shared)} windows in common: KL can't be compared in pairs"
    differences = np.array([[ours[window] - theirs[window] for window in shared]])
    low, high = bootstrap_interval(differences, lambda rows: rows[0], seed=0)
    return (
        f"mean KL of the first less the second over {len(shared)} windows in common: {differences.mean():+.3g} nats, "
        f"95 % interval {low:+.3g} to {high:+.3g}"
    )


def schema_text() -> str:
    """The JSON schema of report.json."""
    return json.dumps(Report.model_json_schema(), indent=2) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line. NibbleError for a run that is not there."""
    options = _parser().parse_args(arguments)
    if options.command == "list":
        list_runs(results_root(), options.model, options.kv, console)
    elif options.command == "show":
        report = read_report(options.run)
        print_report(report, console)
        print(report.summary.model_dump_json(), flush=True)
    elif options.command == "compare":
        compare_runs(read_report(options.first), read_report(options.second), console)
    else:
        print(schema_text(), end="")


def _folder(run: str) -> Path:
    """The folder of a run, from its name in the list or any path."""
    listed = results_root() / run
    return listed if listed.is_dir() else Path(run)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m eval.runs", description="Past evaluations.")
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="all runs")
    listing.add_argument("--model", help="only of this model")
    listing.add_argument("--kv", help="only of this KV recipe")
    show = commands.add_parser("show", help="one run's tables")
    show.add_argument("run", type=_folder, help="its name in the list, or its folder")
    compare = commands.add_parser("compare", help="two runs side by side")
    compare.add_argument("first", type=_folder)
    compare.add_argument("second", type=_folder)
    commands.add_parser("schema", help="the JSON schema of report.json")
    return parser


if __name__ == "__main__":
    run_stage(main)
