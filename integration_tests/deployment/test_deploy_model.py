"""`deploy_model.sh NAME`, with the installed kubectl or kustomize."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from integration_tests.deployment.manifests.rendering import DEPLOYMENT, DIRECTORIES, need_kubectl, objects_of

pytestmark = pytest.mark.deploy

MODELS = [directory.removeprefix("models/") for directory in DIRECTORIES if directory.startswith("models/")]
# Records its arguments and input.
RECORDER = '#!/usr/bin/env bash\necho "{name} $*" >> "{log}"\n{rest}\n'


def deploy(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    env = os.environ | ({"PATH": path} if path else {})
    command = [str(DEPLOYMENT / "deploy_model.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


@pytest.mark.parametrize("name", ["", "nobody", "../overlays/cpu", "bloom/", ".", "--dry-run"])
def test_invalid_names(name: str) -> None:
    result = deploy(*filter(None, [name]))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines()[0] == "Must provide valid model name"
    assert all(model in result.stderr for model in MODELS)


def test_a_dry_run_prints_the_manifests() -> None:
    need_kubectl()
    result = deploy("flan-t5", "--dry-run")
    assert (result.returncode, result.stderr) == (0, "")
    assert list(yaml.safe_load_all(result.stdout)) == objects_of("models/flan-t5")


@pytest.mark.parametrize("renderer", ["kubectl", "kustomize"])
def test_the_rendered_manifests_are_applied(renderer: str, tmp_path: Path) -> None:
    """Stubs replace both programs, because there is no cluster."""
    log = tmp_path / "log"
    says = {
        "kubectl": f'[ "$1" = apply ] && cat >> "{log}" || echo "kind: of kubectl"',
        "kustomize": 'echo "kind: of kustomize"',
    }
    for name in ("bash", "cat", "dirname"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    for name in {"kubectl", renderer}:
        program = tmp_path / name
        program.write_text(RECORDER.format(name=name, log=log, rest=says[name]))
        program.chmod(0o755)
    result = deploy("bloom", path=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    rendered = {"kubectl": "kubectl kustomize models/bloom", "kustomize": "kustomize build models/bloom"}
    expected = [rendered[renderer], "kubectl apply -f -", f"kind: of {renderer}"]
    assert log.read_text().splitlines() == expected


@pytest.mark.parametrize("name", MODELS)
def test_models_are_distinguished(name: str) -> None:
    """The models differ by prefix, by a label in every selector, and by the served model."""
    objects = objects_of(f"models/{name}")
    assert all(one["metadata"]["name"] == f"{name.replace('.', '-')}-inference-server" for one in objects)
    assert all(one["metadata"]["labels"]["model"] == name for one in objects)
    (deployment,) = (one for one in objects if one["kind"] == "Deployment")
    assert deployment["spec"]["selector"]["matchLabels"] == {"app": "inference-server", "model": name}
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    env = {one["name"]: one["value"] for one in container["env"]}
    assert "/" in env["MODEL_NAME"]
    assert env["HF_HUB_CACHE"].startswith("/shared_model_storage/")


def test_it_warns_where_gpus_are_asked_for(tmp_path: Path) -> None:
    for name in ("bash", "cat", "dirname"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    program = tmp_path / "kubectl"
    says = '[ "$1" = kustomize ] && echo "nvidia.com/gpu: 1"'
    program.write_text(RECORDER.format(name="kubectl", log=tmp_path / "log", rest=says + " || cat"))
    program.chmod(0o755)
    result = deploy("bloom", path=str(tmp_path))
    assert (result.returncode, result.stdout) == (0, "nvidia.com/gpu: 1\n")
    warning = "warning: models/bloom asks for GPUs, and its manifests have not been tried with one\n"
    assert result.stderr == warning
