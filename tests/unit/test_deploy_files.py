"""Dockerfile, compose and Kubernetes files against the linters and schemas that their tools would apply."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "docker" / "kubernetes"
BIN = Path(sys.executable).parent


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env={"PATH": "/usr/bin:/bin", **environment}, capture_output=True, text=True, check=False
    )


def test_hadolint() -> None:
    linted = run(str(BIN / "hadolint"), "Dockerfile")
    assert linted.returncode == 0, linted.stdout


def test_dockerfile_copies_what_exists_and_ignores_the_rest() -> None:
    text = (ROOT / "Dockerfile").read_text()
    sources = {name for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE) for name in line.split()}
    assert sources
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source.rstrip("/") in kept, f"{source} is not let through by .dockerignore"


def test_every_target_runs_as_a_user_with_a_health_check() -> None:
    stages = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    targets = {match[1]: stage for stage in stages if (match := re.search(r" AS (cpu|gpu|trtllm)\n", stage))}
    assert set(targets) == {"cpu", "gpu", "trtllm"}
    for stage in targets.values():
        assert re.findall(r"^USER (.+)$", stage, re.MULTILINE)[-1] == "10001"
        assert "HEALTHCHECK" in stage and "image.version" in stage


def test_compose_file() -> None:
    command = [str(BIN / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec", "docker/compose.yaml"]
    checked = run(*command)
    assert checked.returncode == 0, checked.stdout
    for service in yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (ROOT / "docker" / source).exists(), source


def manifests() -> list[tuple[str, dict[str, Any]]]:
    found = []
    for path in sorted((KUBERNETES / "base").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document["kind"] != "Kustomization":
                found.append((path.name, document))
    return found


@pytest.mark.parametrize(("name", "document"), manifests(), ids=lambda value: value if isinstance(value, str) else "")
def test_kubernetes_schema(name: str, document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, "1.33", strict=True)


def test_gpu_overlay_gives_a_valid_deployment() -> None:
    (base,) = [document for _, document in manifests() if document["kind"] == "Deployment"]
    patch = yaml.safe_load((KUBERNETES / "gpu" / "deployment.yaml").read_text())
    merged = merge(base, patch)
    kubernetes_validate.validate(merged, "1.33", strict=True)
    (container,) = merged["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert {probe for probe in container if probe.endswith("Probe")} == {
        "startupProbe",
        "readinessProbe",
        "livenessProbe",
    }


def merge(base: Any, patch: Any) -> Any:
    """Kustomize's strategic merge, as far as these files use it: lists of named things are merged by name."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return {key: merge(base.get(key), patch[key]) if key in patch else base[key] for key in {**base, **patch}}
    if isinstance(base, list) and all(isinstance(item, dict) and "name" in item for item in [*base, *patch]):
        names = dict.fromkeys([item["name"] for item in [*base, *patch]])
        by_name = [{item["name"]: item for item in items} for items in (base, patch)]
        return [merge(by_name[0].get(name), by_name[1].get(name, by_name[0].get(name))) for name in names]
    return patch


def test_kustomizations_name_files_that_exist() -> None:
    for path in KUBERNETES.glob("*/kustomization.yaml"):
        content = yaml.safe_load(path.read_text())
        named = [*content.get("resources", []), *(patch["path"] for patch in content.get("patches", []))]
        assert named and all((path.parent / name).exists() for name in named)
        others = {other.name for other in path.parent.glob("*.yaml")} - {"kustomization.yaml"}
        assert others <= set(named)


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["build"], {"TARGET": "tpu"}, "TARGET: got 'tpu', allowed cpu, gpu, trtllm"),
        (["run"], {}, "got 'run', allowed build, push"),
    ],
)
def test_image_script_refuses(arguments: list[str], environment: dict[str, str], message: str) -> None:
    refused = run("bash", "scripts/image.sh", *arguments, **environment)
    assert refused.returncode == 2
    assert message in refused.stderr
