"""What `make run` refuses before it installs anything, and what it offers for a model, which the service
prints when it is ready."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "serve.sh"


def serve(tmp_path: Path, model: str, **variables: str) -> tuple[str, str]:
    """Return the launcher's READY_TEXT and PLAYGROUND. The launcher is one that prints them."""
    launcher = tmp_path / "text-generation-launcher"
    launcher.write_text('#!/bin/sh\necho "$READY_TEXT" >&2\necho "$PLAYGROUND"\n')
    launcher.chmod(0o755)
    cleared = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PLAY", "CHAT"))
    }
    done = subprocess.run(
        ["sh", str(SCRIPT), str(tmp_path), model, "127.0.0.1"],
        env={**cleared, "HOME": str(tmp_path / "home"), **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr, done.stdout.strip()


def write_directory(path: Path, **settings: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def write_file(path: Path, template: str | None) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    if template:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.mark.parametrize("form", ["directory", "jinja", "hub", "file", "folder"])
@pytest.mark.parametrize("has_template", [True, False])
def test_only_working_choices_are_offered(form: str, has_template: bool, tmp_path: Path) -> None:
    name, template = str(tmp_path / "model"), "{{ messages }}" if has_template else ""
    settings = {"chat_template": template} if has_template and form not in ("jinja", "folder") else {}
    if form == "hub":
        name = "org/model"
        write_directory(tmp_path / "home/.cache/huggingface/hub/models--org--model/snapshots/1", **settings)
    elif form == "file":
        name += ".gguf"
        write_file(Path(name), template)
    else:
        write_directory(Path(name), **settings)
    if form == "jinja" and has_template:
        (Path(name) / "chat_template.jinja").write_text(template)
    if form == "folder":
        write_file(Path(name) / "a.gguf", template)
    said, playground = serve(tmp_path, name)
    assert playground == ("true" if has_template else "false")
    for text in ("/v1/chat/completions", "/playground"):
        assert (text in said) == has_template
    assert ("/v1/completions" in said) != has_template
    assert "client stream" in said


def test_a_template_of_the_user_makes_chats(tmp_path: Path) -> None:
    write_directory(tmp_path / "model")
    said, playground = serve(tmp_path, str(tmp_path / "model"), CHAT_TEMPLATE="a.jinja", PLAYGROUND="false")
    assert "/v1/chat/completions" in said
    assert "/playground" not in said
    assert playground == "false"


def make_run(tmp_path: Path, model: str, target: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Call make with a virtual environment that is missing and a Python without packages."""
    command = [
        "make",
        target,
        f"MODEL_NAME={model}",
        f"VENV={tmp_path / 'venv'}",
        f"PYTHON={sys.executable} -S",
    ]
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **variables}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("target", ["run", "gateway"])
def test_a_model_that_does_not_exist_is_refused_before_the_installation(tmp_path: Path, target: str) -> None:
    done = make_run(tmp_path, "/nowhere/model", target)
    assert done.returncode
    assert done.stderr.startswith(
        "error: Failed to resolve config path: Model /nowhere/model not found; name a"
    )
    assert not [*tmp_path.iterdir()]


def test_models_in_all_forms_pass_the_check(tmp_path: Path) -> None:
    write_directory(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    write_file(tmp_path / "a.gguf", None)
    snapshot = tmp_path / ".cache/huggingface/hub/models--org--model/snapshots/main"
    write_directory(snapshot)
    (snapshot / "config.json").write_text("{}")
    for model in (str(tmp_path / "model"), str(tmp_path / "a.gguf"), "org/model"):
        done = make_run(tmp_path, model, "model-name")
        assert (done.returncode, done.stderr) == (0, "")
    assert make_run(tmp_path, "org/other", "model-name").returncode
    assert not make_run(tmp_path, "org/other", "model-name", COMPAT="tgi").returncode
