"""Checks of all rendered objects by other tools: kubernetes-validate, checkov, yamllint, shellcheck. Each is
shown to refuse something."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from integration_tests.deployment.manifests.custom_resources import OF_SCHEMAS, OF_TYPES
from integration_tests.deployment.manifests.rendering import DEPLOYMENT, DIRECTORIES, objects_of, render

pytestmark = pytest.mark.deploy

VERSIONS = ("1.32", "1.35", "1.37")
SKIPS = DEPLOYMENT / ".checkov.yaml"


def tool(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = shutil.which(name)
    assert command, f"make deploy-check installs {name}"
    return subprocess.run([command, *arguments], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a file for each directory."""
    files = tmp_path_factory.mktemp("rendered")
    for directory in DIRECTORIES:
        (files / f"{directory.replace('/', '-')}.yaml").write_text(render(directory))
    return files


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_accepts_all_manifests(rendered: Path, version: str) -> None:
    """Unknown kinds are exactly those that are checked elsewhere."""
    result = tool("kubernetes-validate", "--strict", "-k", version, *sorted(rendered.iterdir()))
    assert result.returncode == 0, result.stdout
    unknown = {*re.findall(r"Couldn't find schema for kind (\w+)", result.stdout + result.stderr)}
    assert unknown <= {*OF_SCHEMAS, *OF_TYPES}
    passed = re.findall(r"passed for resource", result.stdout + result.stderr)
    objects = [one for directory in DIRECTORIES for one in objects_of(directory)]
    assert len(passed) == sum(one["kind"] not in {*OF_SCHEMAS, *OF_TYPES} for one in objects)


def test_kubernetes_refuses_a_field_that_is_not(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(
        (DEPLOYMENT / "base/deployment.yaml").read_text().replace("readinessProbe", "readinesProbe")
    )
    result = tool("kubernetes-validate", "--strict", str(path))
    assert result.returncode == 1
    assert "readinesProbe" in result.stdout + result.stderr


def test_checkov_reports_only_documented_exceptions(rendered: Path) -> None:
    """The skipped checks are exactly those that fail."""
    result = tool("checkov", "-d", rendered, "--framework", "kubernetes", "--skip-download", "-o", "json")
    checks = json.loads(result.stdout)["results"]
    failed: dict[str, str] = {}
    for one in checks["failed_checks"]:
        failed.setdefault(
            one["check_id"], f"{one['check_id']} {one['check_name']}: {one['resource']} {one['file_path']}"
        )
    skipped = {*yaml.safe_load(SKIPS.read_text())["skip-check"]}
    assert [text for name, text in failed.items() if name not in skipped] == []
    assert skipped - failed.keys() == set(), "skipped for nothing"
    assert len(checks["passed_checks"]) > 1000


def test_every_skip_has_its_reason() -> None:
    lines = SKIPS.read_text().splitlines()
    for number, line in enumerate(lines):
        if line.lstrip().startswith("- CKV"):
            assert lines[number - 1].lstrip().startswith("# "), line


def test_the_files_are_well_written(tmp_path: Path) -> None:
    configuration = DEPLOYMENT / ".yamllint.yaml"
    result = tool("yamllint", "--strict", "-c", configuration, DEPLOYMENT)
    assert result.returncode == 0, result.stdout
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("a: 1\na: 2\n")
    assert "duplication" in tool("yamllint", "--strict", "-c", configuration, wrong).stdout


def test_scripts_are_well_written(tmp_path: Path) -> None:
    scripts = sorted(DEPLOYMENT.glob("*.sh"))
    assert scripts
    result = tool("shellcheck", *scripts)
    assert result.returncode == 0, result.stdout
    wrong = tmp_path / "wrong.sh"
    wrong.write_text("#!/bin/sh\nrm -rf $1/*\n")
    assert "SC2086" in tool("shellcheck", wrong).stdout
