"""Model repositories for engines of TensorRT-LLM, made through protobuf from recorded data and the engine's manifest.

    engine   preprocessing -> tensorrt_llm -> postprocessing, joined by ensemble, and by tensorrt_llm_bls in Python
    llmapi   tensorrt_llm: the PyTorch runtime, with llm.yaml as its model.yaml

Every parameter is filled from the manifest, which was checked against the engine's own config.json; a key of the real
template that is not set is left out, with the reason in data/models.yaml, so that no ${key} ever reaches the server.
The Python files of these models are NVIDIA's and stay in its image: the launch script links them into place.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from nibble import atomic
from nibble.errors import NibbleError
from nibble.trtllm.manifest import LLM_FILE, TrtllmManifest
from serve.trtllm.models import base_config, ensemble_config

PYTHON_MODELS = ("preprocessing", "postprocessing", "tensorrt_llm_bls")
WORKER = "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"
CANCEL_CHECK_MS = 100


def engine_repository(manifest: TrtllmManifest, engine_dir: Path) -> list[ModelConfig]:
    """The five models over an engine of trtllm-build."""
    batch, queue = manifest.limits.max_running, manifest.limits.max_waiting
    tokenizer = str(engine_dir / "tokenizer")
    core = base_config("tensorrt_llm", "tensorrt_llm", "tensorrtllm")
    _set(core, _engine_parameters(manifest, engine_dir))
    core.model_transaction_policy.decoupled = True
    pre = base_config("preprocessing", "preprocessing", "python")
    _set(pre, {"tokenizer_dir": tokenizer, "add_special_tokens": True, "gpt_model_path": str(engine_dir / "engine")})
    post = base_config("postprocessing", "postprocessing", "python")
    _set(post, {"tokenizer_dir": tokenizer, "skip_special_tokens": True})
    bls = base_config("tensorrt_llm_bls", "tensorrt_llm_bls", "python")
    _set(bls, {"accumulate_tokens": False, "tensorrt_llm_model_name": "tensorrt_llm"})
    bls.model_transaction_policy.decoupled = True
    models = [pre, core, post, ensemble_config(), bls]
    for model in models:
        model.max_batch_size = batch
    for model in (pre, core):
        model.dynamic_batching.preferred_batch_size.append(batch)
        model.dynamic_batching.default_queue_policy.max_queue_size = queue
    post.dynamic_batching.SetInParent()
    return models


def llmapi_model() -> ModelConfig:
    """The model over the PyTorch runtime. Streaming and no batching, as in its model.yaml."""
    config = base_config("llmapi", "tensorrt_llm", "python")
    config.model_transaction_policy.decoupled = True
    return config


def llmapi_arguments(engine_dir: Path) -> dict[str, Any]:
    """model.yaml: the engine's llm.yaml, and what Triton needs. One prompt a request, answers as a stream."""
    arguments = yaml.safe_load((engine_dir / LLM_FILE).read_text(encoding="utf-8"))
    served = {"max_batch_size": 0, "decoupled": True, "cancellation_check_period_ms": CANCEL_CHECK_MS}
    return {**arguments, "triton_config": served}


def write_repository(folder: Path, manifest: TrtllmManifest, engine_dir: Path) -> list[str]:
    """Write the repository of an engine, whole or not at all; the names of its models."""
    is_llmapi = manifest.runtime == "pytorch"
    models = [llmapi_model()] if is_llmapi else engine_repository(manifest, engine_dir)
    with atomic.exclusive(folder), atomic.new_directory(folder) as workspace:
        for model in models:
            version = workspace / model.name / "1"
            version.mkdir(parents=True)
            (version / ".keep").touch()  # Triton wants a version folder, and copies drop empty ones
            text = text_format.MessageToString(model)
            check_text(text)
            (version.parent / "config.pbtxt").write_text(text, encoding="utf-8")
        if is_llmapi:
            arguments = yaml.safe_dump(llmapi_arguments(engine_dir), sort_keys=False)
            (workspace / "tensorrt_llm" / "1" / "model.yaml").write_text(arguments, encoding="utf-8")
    return [model.name for model in models]


def check_text(text: str) -> ModelConfig:
    """Parse a config.pbtxt back. NibbleError: not protobuf, a literal ${key}, an empty parameter, a loose end."""
    if "${" in text:
        raise NibbleError(f"config.pbtxt: a template key was not filled: {text[text.index('${') :].split('}')[0]}}}")
    try:
        config = text_format.Parse(text, ModelConfig())
    except text_format.ParseError as error:
        raise NibbleError(f"config.pbtxt: {error}") from error
    if problem := next(_problems(config), None):
        raise NibbleError(f"config.pbtxt of {config.name}: {problem}")
    return config


def _problems(config: ModelConfig) -> Iterator[str]:
    for key, value in config.parameters.items():
        if not value.string_value:
            yield f"parameter {key} is empty; leave it out instead"
    names = [tensor.name for tensor in config.input]
    if len(set(names)) != len(names):
        yield "an input is named twice"
    if bool(config.backend) == (config.platform == "ensemble"):
        yield "it has neither or both of backend and platform"
    made = set(names)
    for step in config.ensemble_scheduling.step:
        for inner, outer in step.input_map.items():
            if outer not in made:
                yield f"input {inner} of {step.model_name} comes from {outer}, which nothing makes before it"
        made |= set(step.output_map.values())
    if config.platform == "ensemble" and (loose := {tensor.name for tensor in config.output} - made):
        yield f"nothing makes its outputs {', '.join(sorted(loose))}"


def _engine_parameters(manifest: TrtllmManifest, engine_dir: Path) -> dict[str, Any]:
    reuse = manifest.engine is not None and manifest.engine.paged_context_fmha
    return {
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": str(engine_dir / "engine"),
        "tokenizer_dir": str(engine_dir / "tokenizer"),
        "executor_worker_path": WORKER,
        "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
        "max_beam_width": 1,
        "batch_scheduler_policy": "guaranteed_no_evict",
        "kv_cache_free_gpu_mem_fraction": manifest.free_gpu_memory_fraction,
        "kv_cache_host_memory_bytes": 0,
        "enable_kv_cache_reuse": reuse,
        "enable_chunked_context": reuse,
        "exclude_input_in_output": True,
        "cancellation_check_period_ms": CANCEL_CHECK_MS,
        "stats_check_period_ms": CANCEL_CHECK_MS,
        "iter_stats_max_iterations": 1000,
        "request_stats_max_iterations": 0,
        "normalize_log_probs": False,
        "num_nodes": -(-manifest.parallel.tensor * manifest.parallel.pipeline // manifest.parallel.gpus_per_node),
        "enable_context_fmha_fp32_acc": True,
        "multi_block_mode": True,
        "cuda_graph_mode": False,
        "cuda_graph_cache_size": 0,
    }


def _set(config: ModelConfig, parameters: dict[str, Any]) -> None:
    for key, value in parameters.items():
        config.parameters[key].string_value = str(value).lower() if isinstance(value, bool) else str(value)
