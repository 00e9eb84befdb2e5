"""A mix of formats shows in the metrics: how many layers have each."""

from __future__ import annotations

from dataclasses import replace

from nibble.formats import FORMATS
from serve.backend.metrics import EngineMetrics
from tests.unit.runtime_cases import make_engine, make_model, make_spec
from tests.unit.serve_fakes import new_family_class


def test_layers_are_counted_by_format() -> None:
    spec = replace(make_spec(make_model(), "int4"), formats=(FORMATS["int4"], FORMATS["k8v4"]))
    assert spec.sealed_page_bytes < make_spec(make_model(), "k8v4").sealed_page_bytes
    stats = replace(make_engine("int4").stats(), layers_by_format={"int4": 1, "k8v4": 1})
    family = new_family_class()
    EngineMetrics(family, "mixed", None).publish(stats)
    for name in ("int4", "k8v4"):
        key = frozenset({"kv": "mixed", "engine": "llm", "format": name}.items())
        assert family.metrics["nibble_kv_layers", key].value == 1
