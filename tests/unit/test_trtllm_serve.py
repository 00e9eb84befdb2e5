"""Serving engines for TensorRT-LLM: repositories that protobuf reads back, launch commands, clients of endpoints."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from google.protobuf import text_format
from rich.console import Console
from tritonclient.grpc import service_pb2
from tritonclient.grpc._infer_result import InferResult
from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.utils import serialize_byte_tensor

from eval import endpoint
from nibble.errors import NibbleError
from nibble.recipes import load_model_recipe, load_serve_recipe
from nibble.trtllm import container
from nibble.trtllm.container import Runner
from nibble.trtllm.install import pth_text
from nibble.trtllm.manifest import LLM_FILE, TrtllmManifest, write_trtllm_manifest
from serve.trtllm import run
from serve.trtllm.client import ENSEMBLE, LLMAPI, endpoint_inputs, read_chunk
from serve.trtllm.launch import Launch, commands, rank_script
from serve.trtllm.models import recorded
from serve.trtllm.repository import check_text, engine_repository, write_repository

IMAGE = "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"


def manifest(folder: Path, runtime: str = "tensorrt", tensor: int = 4, **changes: Any) -> TrtllmManifest:
    """The manifest of a llama-70b engine, written into `folder`."""
    reuse = changes.pop("reuse", False)
    engine = {
        "version": "1.2.1", "kv_cache_quant_algo": "INT8", "tokens_per_block": 64, "paged_context_fmha": reuse,
        "max_batch_size": 16, "max_seq_len": 2048, "max_num_tokens": 8192,
    }  # fmt: skip
    content = {
        "schema": 1, "host": "trtllm", "runtime": runtime, "model": load_model_recipe("llama-70b").model_dump(),
        "cache": "int8", "source": "/models/llama-70b",
        "parallel": {"tensor": tensor, "pipeline": 1, "gpus_per_node": 8}, "limits": load_serve_recipe().model_dump(),
        "reuses_blocks": reuse, "max_num_tokens": 8192, "tokens_per_block": 64, "free_gpu_memory_fraction": 0.9,
        "environment": {"TRTLLM_FORCE_XQA": "1"}, "bytes_per_token": 1.0, "calibration_sha256": None,
        "engine": engine if runtime == "tensorrt" else None, "native": None, "tensorrt_llm": "1.2.1", "created": "",
        **changes,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    if runtime == "pytorch":
        (folder / LLM_FILE).write_text("model: /models/llama-70b\nattn_backend: NIBBLE\n")
    return write_trtllm_manifest(folder, content)


def read_configs(folder: Path) -> dict[str, ModelConfig]:
    paths = sorted(folder.glob("*/config.pbtxt"))
    return {path.parent.name: text_format.Parse(path.read_text(), ModelConfig()) for path in paths}


def test_the_repository_of_an_engine_is_whole(tmp_path: Path) -> None:
    names = write_repository(tmp_path / "models", manifest(tmp_path / "engine"), tmp_path / "engine")
    configs = read_configs(tmp_path / "models")
    assert sorted(names) == sorted(configs) == sorted(config.name for config in configs.values())
    assert set(configs) == {"preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls"}
    for name, config in configs.items():
        known = set(recorded(name).get("parameters", "").split())
        left_out = set(recorded(name).get("left_out", {}))
        assert set(config.parameters) | left_out == known and not set(config.parameters) & left_out
        assert config.max_batch_size == 16
        assert (tmp_path / "models" / name / "1").is_dir()
    core = configs["tensorrt_llm"]
    assert core.backend == "tensorrtllm" and core.model_transaction_policy.decoupled
    assert core.parameters["gpt_model_path"].string_value == str(tmp_path / "engine" / "engine")
    assert core.parameters["enable_kv_cache_reuse"].string_value == "false"
    assert core.parameters["kv_cache_free_gpu_mem_fraction"].string_value == "0.9"
    lengths = next(tensor for tensor in core.input if tensor.name == "input_lengths")
    assert lengths.HasField("reshape") and not lengths.optional
    assert "${" not in "".join(path.read_text() for path in tmp_path.glob("models/*/config.pbtxt"))


def test_reuse_and_chunks_follow_the_engine(tmp_path: Path) -> None:
    models = {model.name: model for model in engine_repository(manifest(tmp_path, reuse=True), tmp_path)}
    found = models["tensorrt_llm"].parameters
    assert {found[key].string_value for key in ("enable_kv_cache_reuse", "enable_chunked_context")} == {"true"}


def test_the_ensemble_joins_tensors_that_exist() -> None:
    for model, step in recorded("ensemble")["steps"].items():
        for side in ("inputs", "outputs"):
            known = {line.split()[0] for line in recorded(model)[side].splitlines()}
            assert {pair.split("=")[0] for pair in step[side].split()} <= known


def test_the_llmapi_repository_has_the_arguments_of_the_runtime(tmp_path: Path) -> None:
    write_repository(tmp_path / "models", manifest(tmp_path / "engine", "pytorch"), tmp_path / "engine")
    (config,) = read_configs(tmp_path / "models").values()
    assert (config.name, config.backend, config.max_batch_size) == ("tensorrt_llm", "python", 0)
    arguments = yaml.safe_load((tmp_path / "models" / "tensorrt_llm" / "1" / "model.yaml").read_text())
    assert arguments["attn_backend"] == "NIBBLE"
    assert arguments["triton_config"]["decoupled"] is config.model_transaction_policy.decoupled is True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name: "a" backend: "${triton_backend}"', r"a template key was not filled: \$\{triton_backend\}"),
        ('name: "a" backnd: "python"', "no field named"),
        ('name: "a"', "neither or both of backend and platform"),
        ('name: "a" backend: "b" parameters {key: "c" value: {string_value: ""}}', "parameter c is empty"),
        ('name: "a" platform: "ensemble" output {name: "text"}', "nothing makes its outputs text"),
    ],
)
def test_bad_configurations_are_named(text: str, message: str) -> None:
    with pytest.raises(NibbleError, match=message):
        check_text(text)


def launch(tmp_path: Path, image: str | None = IMAGE, **changes: Any) -> Launch:
    return Launch(manifest(tmp_path / "engine", **changes), tmp_path / "run", Runner(image))


def test_one_machine_runs_one_process_a_gpu(tmp_path: Path) -> None:
    (words,) = commands(launch(tmp_path))
    line = " ".join(words)
    assert line.startswith("docker run --rm --gpus all") and IMAGE in words and "-e TRTLLM_FORCE_XQA=1" in line
    assert words[-1].endswith(f"exec mpirun --allow-run-as-root -n 4 bash {tmp_path}/run/rank.sh")
    (alone,) = commands(launch(tmp_path, image=None, tensor=1))
    assert alone[:2] == ["env", "TRTLLM_FORCE_XQA=1"] and "mpirun" not in alone[-1]
    (torch_runtime,) = commands(launch(tmp_path, runtime="pytorch"))
    assert "mpirun" not in torch_runtime[-1]  # it starts its own workers


def test_several_machines_are_slurm_tasks(tmp_path: Path) -> None:
    prepare, start = commands(launch(tmp_path, tensor=16))
    assert prepare[:2] == start[:2] == ["srun", "--mpi=pmix"] and prepare[-1].endswith("prepare.sh")
    assert "--ntasks=16" in start and "--ntasks-per-node=8" in start and "-N2" in start
    assert "trtllm-llmapi-launch" in rank_script(launch(tmp_path, runtime="pytorch", tensor=16))


def test_ranks_but_the_first_load_one_model(tmp_path: Path) -> None:
    """The real script, with a program that prints its arguments in tritonserver's place."""
    script = rank_script(launch(tmp_path)).replace("exec /opt/tritonserver/bin/tritonserver", "printf '%s\\n'")
    shown = {}
    for rank in ("0", "3"):
        done = subprocess.run(
            ["bash", "-c", script],
            env={"OMPI_COMM_WORLD_RANK": rank, "PATH": "/bin:/usr/bin"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        shown[rank] = done.stdout.splitlines()
    assert "--load-model=tensorrt_llm" in shown["3"] and "--load-model=tensorrt_llm" not in shown["0"]
    assert "--grpc-port=8001" in shown["0"] and "--backend-config=python,shm-region-prefix-name=rank3_" in shown["3"]


def test_serve_writes_the_repository_and_shows_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NIBBLE_ENGINES", str(tmp_path))
    monkeypatch.setattr(run, "RUN_ROOT", tmp_path / "run")
    monkeypatch.setattr(run, "console", Console(width=300))
    monkeypatch.setattr(container, "installed_version", lambda: None)
    manifest(tmp_path / "llama-70b" / "int8-trtllm")
    run.main(["--model", "llama-70b", "--kv", "int8", "--port", "9000", "--dry-run"])
    shown = capsys.readouterr().out
    assert "mpirun --allow-run-as-root -n 4" in shown and "v2/models/ensemble/generate_stream" in shown
    folder = tmp_path / "run" / "llama-70b-int8-trtllm-9000"
    assert "/app/all_models/inflight_batcher_llm/preprocessing/1" in (folder / "prepare.sh").read_text()
    if shutil.which("bash"):
        subprocess.run(["bash", "-n", folder / "prepare.sh"], check=True)
    with pytest.raises(NibbleError, match="run `make engine HOST=trtllm` first"):
        run.main(["--model", "llama-70b", "--kv", "int8", "--kv-fallback", "fp16", "--dry-run"])


def response(**tensors: Any) -> InferResult:
    """What gRPC hands to the client."""
    message = service_pb2.ModelInferResponse()
    types = {"text_output": "BYTES", "finish_reason": "BYTES", "output_log_probs": "FP32"}
    for name, values in tensors.items():
        data_type = types.get(name, "INT32")
        message.outputs.add(name=name, datatype=data_type, shape=[len(values)])
        array = np.array(values, dtype={"BYTES": np.object_, "FP32": np.float32, "INT32": np.int32}[data_type])
        raw = serialize_byte_tensor(array).item() if data_type == "BYTES" else array.tobytes()
        message.raw_output_contents.append(raw)
    return InferResult(message)


def test_one_call_serves_both_endpoints() -> None:
    parameters = {"max_tokens": 8, "temperature": 0.0, "stop_words": ["\n", "."], "stream": True, "seed": 7}
    ours = {tensor.name(): tensor for tensor in endpoint_inputs(ENSEMBLE, "Hi", parameters)}
    assert ours["text_input"].shape() == [1, 1] and ours["stop_words"].shape() == [1, 2]
    assert "temperature" not in ours and ours["top_k"].datatype() == "INT32"
    theirs = {tensor.name(): tensor for tensor in endpoint_inputs(LLMAPI, "Hi", parameters)}
    assert theirs["text_input"].shape() == [1] and theirs["sampling_param_stop"].shape() == [2]
    assert {"streaming", "sampling_param_top_k", "sampling_param_seed", "return_finish_reason"} <= set(theirs)
    with pytest.raises(NibbleError, match="parameter of ensemble: got priority, allowed max_tokens, temperature"):
        endpoint_inputs(ENSEMBLE, "Hi", {"priority": 1})
    with pytest.raises(NibbleError, match="no chat template"):
        endpoint_inputs(LLMAPI, [{"role": "user", "content": "Hi"}], {})


def test_answers_are_the_same_chunks() -> None:
    first = read_chunk(ENSEMBLE, response(text_output=["Par"], num_input_tokens=[5], num_output_tokens=[1]), "", 0)
    assert (first.text, first.prompt_tokens, first.generated_tokens, first.finish_reason) == ("Par", 5, 1, None)
    whole = read_chunk(LLMAPI, response(text_output=["Paris."], finish_reason=["stop"]), "Par", 1)
    assert (whole.text, whole.finish_reason) == ("is.", "stop")
    assert read_chunk(LLMAPI, response(text_output=["Par"], finish_reason=["None"]), "", 0).finish_reason is None


def test_the_bootstrap_line_does_nothing_unasked(tmp_path: Path) -> None:
    """Python runs the line at each start; without the variable it must not even import our package."""
    path, line = pth_text(tmp_path).splitlines()
    assert path == str(tmp_path)
    code = f"import sys\n{line}\nprint(json.dumps([name for name in sys.modules if name.startswith('nibble')]))"
    done = subprocess.run(
        ["python3", "-S", "-c", "import json\n" + code], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert json.loads(done.stdout) == [], done.stderr


def test_endpoints_are_compared_as_text() -> None:
    prompts = endpoint.passages(5, 40)
    assert len(set(prompts)) == 5 and all(len(prompt.split()) == 40 for prompt in prompts)
    found = endpoint.compare(lambda prompt: prompt[:20], lambda prompt: prompt[:10] + "#" * 10, prompts[:2])
    assert (found.prompts, found.identical, found.mean_common_share) == (2, 0, 0.5)
    assert endpoint.compare(str.upper, str.upper, prompts).identical == 5
    for place in ("vllm@host:8001", "ensemble@host", "native"):
        with pytest.raises(NibbleError, match="allowed kind@host:port with kind one of native, ensemble, llmapi"):
            endpoint.connect(place, 8)
    with pytest.raises(NibbleError, match="the texts hold fewer"):
        endpoint.passages(10_000, 1000)
