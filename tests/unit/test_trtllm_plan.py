"""Plans for TensorRT-LLM: golden files of every shipped recipe, the builder's rules, XQA, containers, the dry run."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from build.run import main, make_limits
from build.trtllm import engine
from build.trtllm.back_check import check_engine
from build.trtllm.command import build_command
from build.trtllm.constraints import check_plan, runtime_conflicts
from build.trtllm.llm_arguments import check_names, llm_arguments
from build.trtllm.plan import EnginePlan
from build.trtllm.recipes import load_host_recipe
from build.trtllm.schema import build_parser
from build.trtllm.stage import TrtllmRequest, build_for_trtllm, plan_request
from build.trtllm.xqa import AttentionShape, predict_xqa
from nibble.errors import NibbleError
from nibble.recipes import load_model_recipe
from nibble.trtllm import container
from nibble.trtllm.container import Runner, choose_runner, shell_line
from nibble.trtllm.manifest import read_trtllm_manifest
from nibble.trtllm.refusals import check_llm_arguments

GOLDEN = Path(__file__).resolve().parents[1] / "trtllm" / "golden"
MODELS = ("llama-8b", "llama-70b", "qwen2.5-7b", "qwen3-8b", "mistral-7b", "smollm2-135m")
ROOT = Path(__file__).resolve().parents[2]


def plan_of(model: str, kv: str, **changes: Any) -> EnginePlan:
    request = TrtllmRequest(model, kv, **changes)
    return plan_request(request, load_model_recipe(model), None, make_limits)


def with_recipe(plan: EnginePlan, **changes: Any) -> EnginePlan:
    return dataclasses.replace(plan, recipe=plan.recipe.model_copy(update=changes))


def golden(model: str) -> dict[str, Any]:
    """What the golden file of a model should hold. To regenerate: python -m tests.unit.test_trtllm_plan."""
    plans = {kv: plan_of(model, kv) for kv in ("fp16", "int8", "fp8")}
    return {
        "config": plans["int8"].config,
        "trtllm-build": {kv: shell_line(build_command(plan, Path("E"))) for kv, plan in plans.items()},
        "llm": llm_arguments(plan_of(model, "int4"), Path("M")),
    }


@pytest.mark.parametrize("model", MODELS)
def test_golden_files(model: str) -> None:
    assert golden(model) == json.loads((GOLDEN / f"{model}.json").read_text())


@pytest.mark.parametrize("kv", ["fp16", "int8", "fp8"])
def test_the_recorded_parser_reads_the_call_back(kv: str) -> None:
    plan = plan_of("llama-70b", kv, context=16384, batch=64)
    found = build_parser().parse_args(build_command(plan, Path("E"))[1:])
    assert (found.max_batch_size, found.max_seq_len, found.tokens_per_block, found.workers) == (64, 16384, 64, 4)
    assert found.use_paged_context_fmha == ("enable" if kv == "fp16" else "disable")
    assert found.max_num_tokens == (8192 if kv == "fp16" else 16384)  # no chunks: a prompt must fit whole
    with pytest.raises(NibbleError, match="invalid choice: 'int4'"):
        build_parser().parse_args(["--gemm_plugin", "int4"])
    with pytest.raises(NibbleError, match="unrecognized arguments: --enable_xqa"):
        build_parser().parse_args(["--enable_xqa", "enable"])


@pytest.mark.parametrize(
    ("kv", "changes", "message"),
    [
        ("int8", {"paged_context_fmha": True}, "Paged Context FMHA doesn't work with int8 kv cache currently"),
        ("fp8", {"paged_context_fmha": True}, "FP8 Paged Context FMHA only works with fp8 quantization workflow"),
    ],
)
def test_rules_of_the_builder_are_explained(kv: str, changes: dict[str, Any], message: str) -> None:
    plan = plan_of("llama-8b", kv)
    check_plan(plan)
    (conflict,) = runtime_conflicts(plan, reuse=True, chunked=False)
    assert "block reuse on an engine without paged context FMHA" in conflict.got
    assert runtime_conflicts(plan_of("llama-8b", "fp16"), reuse=True, chunked=True) == []
    with pytest.raises(NibbleError, match=message):
        check_plan(with_recipe(plan, **changes))


def test_sizes_that_no_engine_can_have() -> None:
    with pytest.raises(NibbleError, match="28 query heads over 8 ranks"):
        check_plan(plan_of("qwen2.5-7b", "int8", tensor=8))
    with pytest.raises(NibbleError, match="128 sequences at once and 64 tokens a step"):
        check_plan(with_recipe(plan_of("llama-8b", "fp16", batch=128), max_num_tokens=64))
    with pytest.raises(NibbleError, match="TP: got 0"):
        plan_of("llama-8b", "int8", tensor=0)
    with pytest.raises(NibbleError, match=r"KV with HOST=trtllm: got 'mixed', allowed fp16, fp8, int4"):
        load_host_recipe("mixed")
    assert plan_of("smollm2-135m", "int8").config["dtype"] == "float16"  # float32 has no fused attention there


@pytest.mark.parametrize(
    ("shape", "architecture", "kernel"),
    [
        (AttentionShape("int8", "bfloat16", 128, 8, 64), 90, "HMMA"),
        (AttentionShape("fp8", "bfloat16", 128, 8, 64), 90, "QGMMA"),
        (AttentionShape("fp8", "bfloat16", 128, 8, 64), 89, "HMMA"),
        (AttentionShape("fp8", "bfloat16", 128, 8, 64), 80, None),
        (AttentionShape("fp16", "float32", 128, 8, 64), 90, None),
        (AttentionShape("int8", "float16", 72, 8, 64), 90, None),
        (AttentionShape("int8", "float16", 128, 33, 64), 90, None),
        (AttentionShape("int8", "float16", 128, 1, 64), 90, None),
        (AttentionShape("int8", "float16", 128, 8, 8), 90, None),
    ],
)
def test_which_kernel_decodes(shape: AttentionShape, architecture: int, kernel: str | None) -> None:
    found = predict_xqa(shape, architecture)
    assert found.kernel == kernel and found.why and found.gpus


def test_versions_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "installed_version", lambda: None)
    assert choose_runner(is_dry_run=True).image == "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"
    with pytest.raises(NibbleError, match=r"IMAGE_TAG: got 26.03, which holds TensorRT-LLM 1.2.0"):
        choose_runner("26.03", is_dry_run=True)
    with pytest.raises(NibbleError, match=r"26.08, which is not known to hold"):
        choose_runner("26.08", is_dry_run=True)
    monkeypatch.setattr(container.shutil, "which", lambda name: None)
    with pytest.raises(NibbleError, match="neither tensorrt_llm nor docker"):
        choose_runner()
    monkeypatch.setattr(container, "installed_version", lambda: "1.2.1")
    assert choose_runner().image is None
    monkeypatch.setattr(container, "installed_version", lambda: "1.3.0rc20")
    with pytest.raises(NibbleError, match=r"got 1.3.0rc20 on this host, allowed 1.2.1"):
        choose_runner()


def test_failing_programs_end_with_their_log(tmp_path: Path) -> None:
    code = "import sys; print('out of memory'); sys.exit(3)"
    with pytest.raises(NibbleError, match=r"ended with 3; its log .*\n.*out of memory"):
        Runner(None).run([sys.executable, "-c", code], {}, tmp_path / "log")


def engine_record(plan: EnginePlan, folder: Path, **changes: Any) -> None:
    """What a builder would leave behind."""
    quantization = {"quant_algo": None, "kv_cache_quant_algo": changes.pop("cache", "INT8")}
    plugins = {"tokens_per_block": 64, "use_paged_context_fmha": False} | changes.pop("plugins", {})
    build = {"max_batch_size": 16, "max_seq_len": 2048, "max_num_tokens": 8192, "plugin_config": plugins}
    content = {
        "version": "1.2.1",
        "pretrained_config": {"quantization": quantization},
        "build_config": build,
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    for rank in range(plan.parallel.world_size):
        (folder / f"rank{rank}.engine").touch()


def test_an_engine_is_checked_against_what_was_asked(tmp_path: Path) -> None:
    plan = plan_of("llama-70b", "int8")
    engine_record(plan, tmp_path)
    assert check_engine(tmp_path, plan).kv_cache_quant_algo == "INT8"
    engine_record(plan, tmp_path, cache=None, plugins={"tokens_per_block": 32}, version="1.2.0")
    (tmp_path / "rank3.engine").unlink()
    with pytest.raises(NibbleError) as caught:
        check_engine(tmp_path, plan)
    for part in (
        "version: got '1.2.0'",
        "kv_cache_quant_algo: got None, asked 'INT8'",
        "tokens_per_block: got 32",
        "ranks 3",
    ):
        assert part in str(caught.value)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NibbleError, match=r"not the config.json of an engine"):
        check_engine(tmp_path, plan)


def test_what_our_cache_refuses_in_the_pytorch_runtime() -> None:
    good = llm_arguments(plan_of("llama-70b", "int4"), Path("M"))
    check_llm_arguments(good)
    with pytest.raises(NibbleError, match=r"llm.yaml: kv_cache_config: got use_kv_cache_manager_v2, allowed"):
        check_names({**good, "kv_cache_config": {"use_kv_cache_manager_v2": True}})
    bad = {**good, "speculative_config": {"decoding_type": "Eagle"}, "max_beam_width": 4}
    bad["kv_cache_config"] = {**good["kv_cache_config"], "host_cache_size": 1 << 30, "tokens_per_block": 32}
    with pytest.raises(NibbleError) as caught:
        check_llm_arguments(bad)
    for part in ("speculative decoding", "max_beam_width 4", "host_cache_size", "tokens_per_block 32, allowed 64"):
        assert part in str(caught.value)


@pytest.mark.parametrize("kv", ["int8", "fp8", "fp16", "int4", "k8v4"])
def test_a_dry_run_explains_every_step(kv: str, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(width=400)
    build_for_trtllm(TrtllmRequest("llama-70b", kv, tag="26.07", is_dry_run=True), make_limits, refuse, console)
    shown = capsys.readouterr().out
    assert "DRY_RUN=1: nothing was written or run" in shown
    wanted = {
        "int8": ["mpirun -n 4", "TRTLLM_FORCE_XQA=1: XQA also", "block reuse and chunked context are off", "XQA HMMA"],
        "fp8": ["takes 163,840 bytes", "block reuse and chunked context are off", "XQA QGMMA"],
        "fp16": ["takes 327,680 bytes", "block reuse and chunked context are on"],
        "int4": ["takes 89,600 bytes", "   | attn_backend: NIBBLE", "starts a worker a GPU itself", "sm_90a"],
        "k8v4": ["takes 130,560 bytes", "327,680 in fp16"],
    }[kv]
    wanted += ["nibble_trtllm.pth"] if kv in ("int4", "k8v4") else ["trtllm-build --checkpoint_dir"]
    assert [part for part in wanted if part not in shown] == [] and "${" not in shown
    assert not (ROOT / "engines" / "llama-70b" / f"{kv}-trtllm").exists()


def refuse(*_: object) -> Path:
    raise AssertionError("a dry run builds nothing")


def test_engines_of_both_runtimes_from_a_real_small_model(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything but trtllm-build itself, whose place is taken by a program that leaves an engine's record."""
    monkeypatch.setenv("NIBBLE_ENGINES", str(tmp_path))
    monkeypatch.setattr(container, "installed_version", lambda: "1.2.1")
    plan = plan_request(
        TrtllmRequest(str(tiny_llama_dir), "fp16"), load_model_recipe(str(tiny_llama_dir)), tiny_llama_dir, make_limits
    )

    def build(runner: Runner, words: list[str], environment: dict[str, str], log: Path) -> None:
        asked = build_parser().parse_args(words[1:])
        assert (Path(asked.checkpoint_dir) / "rank0.safetensors").is_file()
        engine_record(plan, Path(asked.output_dir), cache=None, plugins={"use_paged_context_fmha": True})

    monkeypatch.setattr(Runner, "run", build)
    console = Console(quiet=True)
    manifest = engine.build_tensorrt_engine(plan, tiny_llama_dir, Runner(None), console)
    assert read_trtllm_manifest(plan.target) == manifest
    assert manifest.engine is not None and manifest.engine.paged_context_fmha
    assert sorted(path.name for path in plan.target.iterdir()) == ["engine", "manifest.json", "tokenizer"]

    ours = plan_request(
        TrtllmRequest(str(tiny_llama_dir), "int4"), load_model_recipe(str(tiny_llama_dir)), tiny_llama_dir, make_limits
    )
    written = engine.write_pytorch_engine(ours, tiny_llama_dir, tmp_path / "native", console)
    assert written.environment["TLLM_NIBBLE_ENGINE"] == str(tmp_path / "native")
    assert written.bytes_per_token < manifest.bytes_per_token / 2
    assert yaml.safe_load((ours.target / "llm.yaml").read_text())["attn_backend"] == "NIBBLE"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv", "fp8"], r"KV=fp8 runs with HOST=trtllm only; with HOST=native allowed: fp16, int4"),
        (["--kv", "int4", "--dry-run"], "DRY_RUN=1 explains a build with HOST=trtllm"),
        (["--kv", "int4", "--host", "vllm"], "host: got 'vllm', allowed native, trtllm"),
        (["--kv", "mixed", "--host", "trtllm"], "KV with HOST=trtllm: got 'mixed'"),
    ],
)
def test_what_no_host_can_have(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["build.run", "--model", "llama-8b", *arguments])
    with pytest.raises(NibbleError, match=message):
        main()


if __name__ == "__main__":
    for name in MODELS:
        (GOLDEN / f"{name}.json").write_text(json.dumps(golden(name), indent=1) + "\n")
