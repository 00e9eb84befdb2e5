"""The model repository that Triton loads: config.pbtxt made through protobuf, and the committed model.py beside it.

Protobuf's own parser accepts a config without a backend or with a batch size of -1, so `check_config` adds the rules
that this model depends on.
"""

from __future__ import annotations

import dataclasses
import shutil

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc.model_config_pb2 import ModelConfig

from nibble.atomic import new_directory
from nibble.errors import NibbleError
from nibble.paths import REPOSITORY_ROOT
from serve.settings import ServeSettings
from serve.tensors import INPUTS, MODEL_NAME, OUTPUTS, TensorSpec

MODEL_SOURCE = REPOSITORY_ROOT / "triton_repo" / "native" / "1" / "model.py"


def model_configs(settings: ServeSettings) -> dict[str, ModelConfig]:
    """The configuration of every engine of a server, by Triton's name of it."""
    first = model_config(settings)
    others = {
        engine.triton_model: model_config(
            dataclasses.replace(settings, engine_dir=engine.engine_dir, options=engine.options, labels=engine.labels),
            engine.triton_model,
        )
        for engine in settings.beside
    }
    return {first.name: first, **others}


def model_config(settings: ServeSettings, name: str = MODEL_NAME) -> ModelConfig:
    """The configuration of the first engine of these settings."""
    config = ModelConfig(name=name, backend="python", max_batch_size=1)
    config.model_transaction_policy.decoupled = True
    config.instance_group.add(count=1, kind=model_config_pb2.ModelInstanceGroup.KIND_CPU)
    for spec in INPUTS.values():
        config.input.add(name=spec.name, data_type=_data_type(spec), dims=spec.dims, optional=True)
    for spec in OUTPUTS.values():
        config.output.add(name=spec.name, data_type=_data_type(spec), dims=spec.dims)
    for key, value in _parameters(settings).items():
        config.parameters[key].string_value = value
    return config


def check_config(text: str) -> ModelConfig:
    """Parse a config.pbtxt and check what this model depends on. Raises NibbleError with line or field."""
    try:
        config = text_format.Parse(text, ModelConfig())
    except text_format.ParseError as error:
        raise NibbleError(f"config.pbtxt: {error}") from error
    for is_right, rule in _rules(config):
        if not is_right:
            raise NibbleError(f"config.pbtxt: {rule}")
    return config


def write_repository(settings: ServeSettings) -> None:
    """Write models/<name>/{config.pbtxt,1/model.py} of each engine, all or nothing."""
    with new_directory(settings.models_dir) as workspace:
        for name, config in model_configs(settings).items():
            text = text_format.MessageToString(config)
            check_config(text)
            version = workspace / name / "1"
            version.mkdir(parents=True)
            (version.parent / "config.pbtxt").write_text(text)
            shutil.copyfile(MODEL_SOURCE, version / "model.py")


def _rules(config: ModelConfig) -> list[tuple[bool, str]]:
    instances = [group.count for group in config.instance_group]
    return [
        (
            config.name == MODEL_NAME or config.name.startswith(f"{MODEL_NAME}-"),
            f"name: got {config.name!r}, allowed {MODEL_NAME!r} or '{MODEL_NAME}-<kv>'",
        ),
        (config.backend == "python", f"backend: got {config.backend!r}, allowed 'python'"),
        (config.max_batch_size == 1, f"max_batch_size: got {config.max_batch_size}, allowed 1 (the engine batches)"),
        (config.model_transaction_policy.decoupled, "model_transaction_policy: decoupled must be true (streaming)"),
        (instances == [1], f"instance_group: got counts {instances}, allowed [1] (one engine owns the pages)"),
        (_names(config.input) == list(INPUTS), f"input: got {_names(config.input)}, allowed {list(INPUTS)}"),
        (_names(config.output) == list(OUTPUTS), f"output: got {_names(config.output)}, allowed {list(OUTPUTS)}"),
        *((key in config.parameters, f"parameters: {key} is missing") for key in ("repository_root", "engine_dir")),
    ]


def _parameters(settings: ServeSettings) -> dict[str, str]:
    options = {key: str(value) for key, value in dataclasses.asdict(settings.options).items() if value is not None}
    return {
        "repository_root": str(REPOSITORY_ROOT),
        "engine_dir": str(settings.engine_dir.resolve()),
        **settings.labels,
        **options,
    }


def _data_type(spec: TensorSpec) -> int:
    return int(
        model_config_pb2.DataType.Value("TYPE_STRING" if spec.data_type == "BYTES" else f"TYPE_{spec.data_type}")
    )


def _names(tensors: object) -> list[str]:
    return [tensor.name for tensor in tensors]  # type: ignore[attr-defined]
