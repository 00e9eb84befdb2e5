"""SmolLM2 engines of every format: built, self-checked and read back."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from build.engine import BuildRequest, build_engine
from calibrate.pipeline import CalibrationRequest, calibrate
from calibrate.run import SHIPPED_PROMPTS
from nibble.calibration import Calibration
from nibble.formats import FORMATS, SealedPageLayout
from nibble.manifest import read_manifest
from nibble.recipes import load_kv_recipe, load_model_recipe, load_serve_recipe

pytestmark = pytest.mark.model

LARGEST_ERROR = {4: 0.22, 8: 0.05, 16: 1e-6}  # with what static ranges of a few prompts cut off


@pytest.fixture(scope="module")
def calibration(smollm2_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    """Ranges of a few prompts, long enough to reach the positions of the self-check: RoPE turns K with position."""
    out = tmp_path_factory.mktemp("calibration")
    recipe = load_model_recipe("smollm2-135m")
    return calibrate(CalibrationRequest(recipe, str(SHIPPED_PROMPTS), count=12, seed=0, max_tokens=384, out=out))


@pytest.mark.parametrize("kv", sorted(FORMATS))
def test_every_format_builds(
    kv: str, calibration: Calibration, smollm2_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIBBLE_ENGINES", str(tmp_path))
    needed = calibration if FORMATS[kv].needs_calibration else None
    recipes = load_model_recipe("smollm2-135m"), load_kv_recipe(kv), load_serve_recipe()
    request = BuildRequest(*recipes, source=smollm2_source, calibration=needed)
    build_engine(request, Console(quiet=True))
    manifest = read_manifest(request.target)
    assert len(manifest.layers) == 30
    assert manifest.bytes_per_token == 30 * 3 * SealedPageLayout(FORMATS[kv], 64).bytes_per_token
    for layer in manifest.layers:
        assert layer.roundtrip.k_relative_error <= LARGEST_ERROR[FORMATS[kv].k.bits], layer.index
        assert layer.roundtrip.v_relative_error <= LARGEST_ERROR[FORMATS[kv].v.bits], layer.index
    manifest.verify_weights(request.target)
