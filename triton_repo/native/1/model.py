"""NibbleKV as a Triton Python model.

Triton's stub for Python 3.11 and newer ignores PYTHONPATH, so the repository's root comes as a model parameter and goes
into sys.path here, before anything of ours is imported. The model itself is serve/backend/served_model.py.
"""

from __future__ import annotations

import json
import sys
from typing import Any


class TritonPythonModel:
    """What Triton calls: initialize once, execute for each batch of requests, finalize once."""

    def initialize(self, args: dict[str, str]) -> None:
        entries = json.loads(args["model_config"])["parameters"]
        parameters = {name: entry["string_value"] for name, entry in entries.items()}
        parameters["triton_model"] = args["model_name"]
        sys.path.insert(0, parameters.pop("repository_root"))
        from serve.backend.served_model import ServedModel

        self._model = ServedModel(parameters)

    def execute(self, requests: list[Any]) -> None:
        self._model.execute(requests)

    def finalize(self) -> None:
        self._model.finalize()
