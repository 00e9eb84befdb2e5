"""lm-evaluation-harness over our engines: any task it knows, and our offline ones, through its model API.

    EXTRAS="dev eval" make setup
    python -m eval.harness --model smollm2-135m --kv int4 --tasks nibble_copy,nibble_json --limit 8
    python -m eval.harness --url 127.0.0.1:8001 --tasks nibble_copy            a served endpoint instead

Tasks whose data lie on a hub need the hub; those of eval/tasks need nothing. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from eval.hosts import LanguageHost, NativeHost, Prompt, TritonHost
from eval.subjects import require_engine
from eval.suite import TASK_FOLDER
from nibble.runtime import Engine, EngineLimits
from nibble.stage import run_stage

DEFAULT_ANSWER_TOKENS = 256


class HarnessModel(LM):
    """The harness's three methods over one of our hosts."""

    def __init__(self, host: LanguageHost) -> None:
        super().__init__()
        self.host = host

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        scores = self.host.log_likelihood([request.args for request in requests])
        return [(score.log_likelihood, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        return self.host.rolling_log_likelihood([request.args[0] for request in requests])

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return self.host.generate_until([_prompt(*request.args) for request in requests])


def run_harness(host: LanguageHost, tasks: list[str], limit: int | None = None) -> dict[str, dict[str, Any]]:
    """The harness's results by task."""
    manager = TaskManager(include_path=str(TASK_FOLDER))
    found = simple_evaluate(
        HarnessModel(host), tasks=list(tasks), limit=limit, task_manager=manager, bootstrap_iters=0, log_samples=False
    )
    assert found is not None  # only ranks other than 0 get nothing
    return dict(found["results"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run tasks from the command line."""
    parser = argparse.ArgumentParser(prog="python -m eval.harness", description="Tasks by lm-evaluation-harness.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kv", default="int4")
    parser.add_argument("--url", help="gRPC address of a running server, instead of an engine")
    parser.add_argument("--tasks", required=True, help="names, separated by commas; ours are nibble_*")
    parser.add_argument("--limit", type=int, help="documents of each task")
    parser.add_argument("--context", type=int, default=4096, help="longest sequence of an engine, tokens")
    options = parser.parse_args(arguments)
    results = run_harness(_host(options), options.tasks.split(","), options.limit)
    print(json.dumps(results, default=str))


def _host(options: argparse.Namespace) -> LanguageHost:
    if options.url:
        return TritonHost(options.url)
    limits = EngineLimits(max_context=options.context, max_running=8)
    return NativeHost(Engine.load(require_engine(options.model, options.kv), limits))


def _prompt(text: str, options: dict[str, Any]) -> Prompt:
    until = options.get("until") or []
    stop = [until] if isinstance(until, str) else list(until)
    return Prompt(text, tuple(stop), int(options.get("max_gen_toks", DEFAULT_ANSWER_TOKENS)))


if __name__ == "__main__":
    run_stage(main)
