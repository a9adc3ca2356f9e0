"""Renders every directory of deployment/ once with `kubectl kustomize`, and reads the base as written if
there is no kubectl."""

import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
DEPLOYMENT = ROOT / "deployment"
DIRECTORIES = sorted(
    str(path.parent.relative_to(DEPLOYMENT))
    for pattern in ("base", "overlays/*", "models/*", "gateway/*", "kserve", "kserve/*", "storage")
    for path in DEPLOYMENT.glob(f"{pattern}/kustomization.yaml")
    if "kind: Kustomization" in path.read_text()
)
# Meant to be applied almost unchanged.
PRODUCTION = "overlays/production"

Object = dict[str, Any]


def need_kubectl() -> str:
    command = shutil.which("kubectl")
    if command is None:
        pytest.skip("NOT CHECKED, no kubectl here: whether the directories of deployment/ render")
    return command


def render_path(directory: Path) -> str:
    """Return YAML. A warning of kubectl is a failure, too."""
    command = [need_kubectl(), "kustomize", str(directory)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


@functools.cache
def render(directory: str) -> str:
    """Directories of deployment/."""
    return render_path(DEPLOYMENT / directory)


def objects_of(directory: str) -> list[Object]:
    """Return new objects, which may be changed."""
    return list(yaml.safe_load_all(render(directory)))


def written(*names: str) -> list[Object]:
    """Return the objects of files in deployment/, without kustomize."""
    return [one for name in names for one in yaml.safe_load_all((DEPLOYMENT / name).read_text())]


def name_of(one: Object) -> str:
    return f"{one['kind']}/{one['metadata']['name']}"
