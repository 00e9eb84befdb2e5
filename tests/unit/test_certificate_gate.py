"""The certificate before a server: what each fault of it is called, and what recipe and operator make of that."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nibble import __version__
from nibble.certificate import (
    CERTIFICATE_FILE,
    CertificateBody,
    CertifiedEngine,
    Standing,
    check_certificate,
    judge,
    sign_body,
    write_certificate,
)
from nibble.errors import NibbleError
from nibble.manifest import Manifest, compute_engine_hash, read_manifest
from nibble.recipes import CertificateRecipe, load_kv_recipe, load_model_recipe, load_serve_recipe
from nibble.signing import signing_key_path
from serve.certificate_gate import pass_gate
from serve.repository import model_config
from serve.settings import EngineOptions, ServeSettings

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """An engine folder with a manifest and no weights: all that the gate reads."""
    folder = tmp_path / "smollm2-135m" / "int4"
    folder.mkdir(parents=True)
    recipe = load_kv_recipe("int4")
    content: dict[str, Any] = {
        "schema": 1,
        "build_key": "key",
        "host": "native",
        "model": {
            "name": "smollm2-135m", "recipe": load_model_recipe("smollm2-135m").model_dump(), "source": "../source",
            "config_sha256": "c", "weights_sha256": "w", "tokenizer_sha256": "t", "num_layers": 0, "num_kv_heads": 3,
            "head_dim": 64, "max_positions": 8192,
        },
        "kv": {"recipe": recipe.model_dump(), "format": {"k": recipe.k.model_dump(), "v": recipe.v.model_dump()}},
        "policy": {"sink_pages": 1, "recent_pages": 1, "page_tokens": 64},
        "layers": [], "bytes_per_token": 1.0, "bytes_per_token_fp16": 4.0,
        "limits": load_serve_recipe().model_dump(), "calibration": {"sha256": None}, "files": {}, "versions": {},
        "created": "now",
    }  # fmt: skip
    content["engine_hash"] = compute_engine_hash(content)
    (folder / "manifest.json").write_text(json.dumps(content))
    return folder


def certify(folder: Path, *, kl: float = 0.001, **changes: Any) -> None:
    manifest = read_manifest(folder)
    figure = judge("mean KL", kl, 0.005, "at most", interval=[kl, kl], samples=10, unit="positions")
    body = CertificateBody(
        schema=1,
        created="2026-01-01T00:00:00+00:00",
        engine=CertifiedEngine(
            model="smollm2-135m",
            kv="int4",
            engine_hash=manifest.engine_hash,
            baseline_hash="b",
            nibble_version=changes.pop("version", __version__),
        ),
        inputs={"windows": "w"},
        figures=[figure],
        thresholds=changes.pop("thresholds", manifest.kv.recipe.certificate),
        verdict="passed" if figure.passed else "failed",
        reasons=[] if figure.passed else ["mean KL: 0.0100, allowed at most 0.005"],
    )
    write_certificate(folder, sign_body(body))


def edit_certificate(folder: Path, edit: Edit) -> None:
    content = json.loads((folder / CERTIFICATE_FILE).read_text())
    edit(content)
    (folder / CERTIFICATE_FILE).write_text(json.dumps(content))


def standing(folder: Path) -> Standing:
    return check_certificate(folder, read_manifest(folder))[0]


def rebuild(folder: Path) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    content["policy"]["recent_pages"] = 2
    content["engine_hash"] = compute_engine_hash(content)
    (folder / "manifest.json").write_text(json.dumps(content))


def tear(folder: Path) -> None:
    (folder / CERTIFICATE_FILE).write_text("{")


def edited(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_certificate(folder, lambda content: content["body"].update(changes))


def flatter(content: dict[str, Any]) -> None:
    content["body"]["figures"][0]["value"] = 0.0


FAULTS: list[tuple[str, Callable[[Path], None], Standing]] = [
    ("none", lambda folder: (folder / CERTIFICATE_FILE).unlink(), Standing.MISSING),
    ("not JSON", tear, Standing.TAMPERED),
    ("a figure edited", lambda folder: edit_certificate(folder, flatter), Standing.TAMPERED),
    ("the verdict edited", edited(verdict="failed"), Standing.TAMPERED),
    ("a field added", edited(note="x"), Standing.TAMPERED),
    ("another engine", rebuild, Standing.STALE),
    ("another version", lambda folder: certify(folder, version="0.0.0"), Standing.STALE),
    ("other thresholds", lambda folder: certify(folder, thresholds=CertificateRecipe(kl_mean=1.0)), Standing.STALE),
    ("failed", lambda folder: certify(folder, kl=0.01), Standing.FAILED),
    ("another signer", lambda folder: signing_key_path().unlink(), Standing.UNTRUSTED),
]


@pytest.mark.parametrize(("spoil", "expected"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_every_fault_has_its_name(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None], expected: Standing
) -> None:
    monkeypatch.setenv("NIBBLE_SIGNING_KEY", str(tmp_path / "key.pem"))
    certify(engine)
    assert standing(engine) is Standing.VALID
    assert (tmp_path / "key.pem").stat().st_mode & 0o777 == 0o600
    spoil(engine)
    assert standing(engine) is expected


def test_a_strangers_key_is_trusted_when_it_is_named(
    engine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NIBBLE_SIGNING_KEY", str(tmp_path / "theirs.pem"))
    certify(engine)
    signer = json.loads((engine / CERTIFICATE_FILE).read_text())["signature"]["fingerprint"]
    monkeypatch.setenv("NIBBLE_SIGNING_KEY", str(tmp_path / "ours.pem"))
    assert standing(engine) is Standing.UNTRUSTED
    monkeypatch.setenv("NIBBLE_TRUSTED_KEYS", f"0123456789abcdef, {signer}")
    assert standing(engine) is Standing.VALID


def gate(folder: Path, action: str | None = None, **options: Any) -> tuple[ServeSettings, str]:
    said = io.StringIO()
    settings = ServeSettings("smollm2-135m-int4", folder, options=EngineOptions(**options))
    return pass_gate(settings, action, Console(file=said, width=500)), said.getvalue()


def test_an_uncertified_engine_falls_back_as_its_recipe_says(engine: Path) -> None:
    settings, said = gate(engine)
    assert settings.options.kv_fallback == "fp16"
    assert "make certify MODEL=smollm2-135m KV=int4" in said
    parameters = model_config(settings).parameters
    assert "certificate missing" in parameters["kv_fallback_reason"].string_value
    assert parameters["certificate"].string_value == "missing"


@pytest.mark.parametrize(("action", "fallback"), [("warn", None), ("ignore", None), ("fallback", "fp16")])
def test_the_operator_decides_otherwise(engine: Path, action: str, fallback: str | None) -> None:
    assert gate(engine, action)[0].options.kv_fallback == fallback


def test_refusal_names_the_reason_and_the_ways_out(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CERTIFICATE", "refuse")
    with pytest.raises(NibbleError, match=r"certificate missing: .*make certify.*CERTIFICATE=warn, KV_FALLBACK=fp16"):
        gate(engine)
    monkeypatch.setenv("CERTIFICATE", "maybe")
    with pytest.raises(NibbleError, match="got 'maybe', allowed refuse, fallback, warn, ignore"):
        gate(engine)


def test_a_certified_engine_and_a_fallback_that_was_asked_for_pass(engine: Path) -> None:
    assert gate(engine, "refuse", kv_fallback="fp16")[0].options.certificate is None
    certify(engine)
    settings, said = gate(engine, "refuse")
    assert (settings.options.kv_fallback, settings.options.certificate) == (None, "valid")
    assert "certificate valid" in said


def test_thresholds_are_part_of_what_an_engine_is(engine: Path) -> None:
    manifest: Manifest = read_manifest(engine)
    content = json.loads((engine / "manifest.json").read_text())
    content["kv"]["recipe"]["certificate"]["kl_mean"] = 9.0
    assert compute_engine_hash(content) != manifest.engine_hash
