"""The engine behind Triton's Python interface: the only module that knows `pb_utils`.

Runs in Triton's stub process. `execute` hands requests to the engine thread and returns at once (decoupled).
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils  # exists only inside Triton's stub

from nibble.errors import NibbleError
from nibble.runtime import Engine, EngineLimits
from serve.backend.answers import Answer
from serve.backend.loop import Ask, EngineLoop
from serve.backend.metrics import EngineMetrics
from serve.backend.requests import Question, read_question
from serve.backend.token_report import TokenReport
from serve.tensors import INPUTS, MODEL_NAME

EXIT_CODE_FAULT = 70
LIMITS = ("max_context", "max_running", "chunk_tokens", "max_waiting", "threads", "pool_mb")


class ServedModel:
    """One engine and its thread. parameters: those of config.pbtxt, as text."""

    def __init__(self, parameters: Mapping[str, str]) -> None:
        """Load the engine. Raises TritonModelException with the reason when it can't be loaded."""
        try:
            engine = _load_engine(parameters)
        except NibbleError as error:
            raise pb_utils.TritonModelException(str(error)) from error
        except torch.OutOfMemoryError as error:
            raise pb_utils.TritonModelException(_describe_full_card(error)) from error
        reason = _fallback_reason(engine, parameters)
        self._describe = TokenReport(engine.tokenizer)
        self._closing = {"kv_format": engine.kv_name, "kv_fallback_reason": reason or ""}
        metrics = EngineMetrics(
            pb_utils.MetricFamily,
            engine.kv_name,
            reason,
            parameters.get("certificate", "unchecked"),
            parameters.get("triton_model", MODEL_NAME),
        )
        gc.collect()
        gc.freeze()  # a full collection would stop all streams to look at a million objects that stay
        self._engine = engine
        self._loop = EngineLoop(engine, metrics, on_fault=_end_process)
        self._loop.start()

    def execute(self, requests: list[Any]) -> None:
        """Hand each request to the engine thread."""
        for request in requests:
            question = _read(request)
            answer = Answer(TritonChannel(request.get_response_sender()), question, self._closing, self._describe)
            self._loop.ask(Ask(question, answer, request.request_id()))

    def finalize(self) -> None:
        self._loop.stop()
        self._engine.close()


class TritonChannel:
    """`answers.Channel` over a response sender."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender

    def send(self, tensors: Mapping[str, np.ndarray], is_final: bool) -> None:
        outputs = [pb_utils.Tensor(name, array) for name, array in tensors.items()]
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_final else 0
        self._sender.send(pb_utils.InferenceResponse(output_tensors=outputs), flags=flags)

    def fail(self, code: str, message: str) -> None:
        error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, code))
        response = pb_utils.InferenceResponse(output_tensors=[], error=error)
        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def close(self) -> None:
        self._sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())


def _load_engine(parameters: Mapping[str, str]) -> Engine:
    began = time.monotonic()
    directory = Path(parameters["engine_dir"])
    _log(f"loading {directory}")
    given: dict[str, Any] = {name: int(parameters[name]) for name in LIMITS if name in parameters}
    limits = EngineLimits(**given)
    engine = Engine.load(directory, limits, kv_fallback=parameters.get("kv_fallback"))
    if reason := _fallback_reason(engine, parameters):
        _log(f"KV FALLBACK: cache is {engine.kv_name}: {reason}")
    _log(f"certificate: {parameters.get('certificate', 'unchecked')}")
    _log(f"pools: {engine.pool_sizes.describe(engine.spec)}")
    _log(f"loaded with KV={engine.kv_name} on {engine.device} in {time.monotonic() - began:.1f} s")
    return engine


def _describe_full_card(error: torch.OutOfMemoryError) -> str:
    """What a GPU without room for the weights or a step means for whoever starts a server."""
    free, total = (size / 2**30 for size in torch.cuda.mem_get_info())
    return (
        f"GPU memory: {str(error).partition('. ')[0]}; {free:.1f} of {total:.1f} GiB are free beside what is loaded "
        "so far. See what else runs there (nvidia-smi), serve with a smaller --pool-mb, --batch or --context, or split "
        "the model (tensor_parallel in its recipe)"
    )


def _fallback_reason(engine: Engine, parameters: Mapping[str, str]) -> str | None:
    """Why the cache is not the one built: the certificate gate's reason, or the engine's own."""
    return engine.fallback_reason and parameters.get("kv_fallback_reason", engine.fallback_reason)


def _read(request: Any) -> Question | NibbleError:
    tensors = {name: pb_utils.get_input_tensor_by_name(request, name) for name in INPUTS}
    arrays = {name: tensor.as_numpy() for name, tensor in tensors.items() if tensor is not None}
    try:
        return read_question(arrays, json.loads(request.parameters() or "{}"))
    except NibbleError as error:
        return error


def _log(message: str) -> None:
    pb_utils.Logger.log_info(f"nibble: {message}")


def _end_process(trace: str) -> None:
    """A stub that can't answer must not look healthy: end it, so that the supervisor sees it and starts anew."""
    pb_utils.Logger.log_error(f"nibble: the engine failed\n{trace}")
    time.sleep(0.5)  # the errors just sent leave through shared memory
    os._exit(EXIT_CODE_FAULT)
