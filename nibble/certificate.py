"""certificate.json: what an engine's KV cache was measured to cost, bound to that very engine and signed.

    engines/<model>/<kv>/certificate.json     read by `make serve`
    results/<model>/<kv>/<stamp>/             a copy beside the report that it sums up

The certificate names the engine by its hash, the inputs by theirs, and gives every figure with its interval, sample
count and threshold. `check_certificate` says whether it may be believed for the engine that lies beside it.
"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Literal

from pydantic import Field

from nibble import __version__, atomic
from nibble.errors import NibbleError
from nibble.manifest import Manifest
from nibble.recipes import CertificateRecipe
from nibble.signing import Signature, is_trusted, is_valid, sign
from nibble.strict_yaml import StrictModel, validate

CERTIFICATE_FILE = "certificate.json"
SCHEMA = 1


class Figure(StrictModel):
    """One measured figure. judged: the value held against the threshold (an interval's bad end, where one is judged).

    samples: what `unit` counts (positions, cells, documents). passed: on the right side of the threshold.
    """

    name: str
    value: float
    interval: list[float] | None
    samples: int
    unit: str
    judged: float
    threshold: float
    relation: Literal["at most", "at least"]
    passed: bool


class CertifiedEngine(StrictModel):
    """What was measured: an engine by its hash, its fp16 twin, and the version of the code that ran both."""

    model: str
    kv: str
    engine_hash: str
    baseline_hash: str
    nibble_version: str


class CertificateBody(StrictModel):
    """What is signed. inputs: SHA-256 by name of what was read. reasons: why the verdict is not `passed`."""

    schema_version: Literal[1] = Field(alias="schema")
    created: str
    engine: CertifiedEngine
    inputs: dict[str, str]
    figures: list[Figure]
    thresholds: CertificateRecipe
    verdict: Literal["passed", "failed"]
    reasons: list[str]


class Certificate(StrictModel):
    """All of certificate.json."""

    body: CertificateBody
    signature: Signature


class Standing(StrEnum):
    """What a certificate is worth for the engine beside it."""

    VALID = "valid"
    MISSING = "missing"
    TAMPERED = "tampered"
    UNTRUSTED = "untrusted"
    STALE = "stale"
    FAILED = "failed"
    UNNEEDED = "unneeded"


def judge(
    name: str, value: float, threshold: float, relation: Literal["at most", "at least"], **sample: object
) -> Figure:
    """A figure held against its threshold. sample: interval, samples, unit, and `judged` where it is not the value."""
    judged = float(sample.pop("judged", value))  # type: ignore[arg-type]
    passed = judged <= threshold if relation == "at most" else judged >= threshold
    return Figure(
        name=name,
        value=value,
        judged=judged,
        threshold=threshold,
        relation=relation,
        passed=passed,
        **sample,  # type: ignore[arg-type]
    )


def sign_body(body: CertificateBody) -> Certificate:
    """The certificate of a body, signed with this user's key."""
    return Certificate(body=body, signature=sign(body.model_dump(by_alias=True, mode="json")))


def write_certificate(folder: Path, certificate: Certificate) -> Path:
    """Write certificate.json into a folder, whole or not at all."""
    content = certificate.model_dump(by_alias=True, mode="json")
    path = folder / CERTIFICATE_FILE
    atomic.write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")
    return path


def check_certificate(engine_dir: Path, manifest: Manifest) -> tuple[Standing, str]:
    """What the certificate beside an engine is worth, and why in a sentence that says what to do."""
    name, kv = manifest.model.name, manifest.kv.recipe.name
    again = f"run: make certify MODEL={name} KV={kv}"
    if manifest.kv.recipe.format.is_fp16:
        return Standing.UNNEEDED, "an fp16 cache is the yardstick itself"
    if manifest.model.recipe.has_dummy_weights:
        return Standing.MISSING, f"engine {name} {kv} has dummy weights: it answers at random and can't be certified"
    path = engine_dir / CERTIFICATE_FILE
    if not path.is_file():
        return Standing.MISSING, f"engine {name} {kv} has no certificate; {again}"
    try:
        certificate, content = _read(path)
    except NibbleError as error:
        return Standing.TAMPERED, f"{error}; {again}"
    body, signer = certificate.body, certificate.signature
    if not is_valid(content["body"], signer):
        return Standing.TAMPERED, f"{path.name}: its signature is not of its content: it was edited; {again}"
    if not is_trusted(signer):
        return Standing.UNTRUSTED, (
            f"{path.name} is signed by key {signer.fingerprint}, which this machine does not know; {again}, or name "
            "the key in NIBBLE_TRUSTED_KEYS"
        )
    if body.engine.engine_hash != manifest.engine_hash:
        return (
            Standing.STALE,
            f"{path.name} is for engine {body.engine.engine_hash[:12]}, this is {manifest.engine_hash[:12]}; {again}",
        )
    if body.engine.nibble_version != __version__:
        return (
            Standing.STALE,
            f"{path.name} was measured with NibbleKV {body.engine.nibble_version}, this is {__version__}; {again}",
        )
    if body.thresholds != manifest.kv.recipe.certificate:
        return Standing.STALE, f"{path.name} was judged by other thresholds than the engine's recipe has; {again}"
    if body.verdict != "passed":
        return Standing.FAILED, f"engine {name} {kv} failed its certification: {'; '.join(body.reasons)}"
    return Standing.VALID, f"certified {body.created} by key {signer.fingerprint}"


def _read(path: Path) -> tuple[Certificate, dict[str, dict[str, object]]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise NibbleError(f"{path}: can't be read ({error})") from error
    if not isinstance(content, dict):
        raise NibbleError(f"{path}: got {type(content).__name__} at the top, allowed a mapping")
    return validate(Certificate, content, str(path)), content
