"""GGUF files are refused in one line that says how they are converted."""

import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import transformers
from click.testing import CliRunner

from tgis.cli import models
from tgis.hub.cache import find_model, find_model_files
from tgis.hub.gguf import SCRIPT, refuse_gguf, refuse_gguf_on_hub
from tgis.hub.model_files import ModelNotFoundError

NAME = "small-q4.gguf"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "a model").mkdir()
    file = tmp_path / "a model" / NAME
    file.write_bytes(b"GGUF\x03\0\0\0")
    return file


def check(text: str, directory: str, name: str = NAME) -> None:
    """Check that a text is one line that says what is wrong and ends with a command that a shell reads."""
    assert "\n" not in text
    before, _, command = text.partition(
        " is a GGUF file, which is not served yet; transformers converts it: "
    )
    assert before.endswith(name)
    install, _, convert = command.partition(" && ")
    assert install == "pip install gguf"
    assert shlex.split(convert) == ["python", "-c", SCRIPT, directory, name, Path(name).stem]


def test_a_file_and_its_directory_are_refused(file: Path, tmp_path: Path) -> None:
    for name in (str(file), str(file.parent)):
        with pytest.raises(ModelNotFoundError) as caught:
            find_model(name, None, tmp_path)
        check(str(caught.value), str(file.parent))
    (file.parent / "config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match="which is not served yet"):
        find_model(str(file.parent), None, tmp_path)
    with pytest.raises(ModelNotFoundError, match="which is not served yet"):
        find_model_files(str(file), None, tmp_path)


def test_a_file_with_another_name_is_refused(file: Path) -> None:
    other = file.rename(file.with_name("weights"))
    with pytest.raises(ModelNotFoundError, match="is a GGUF file"):
        refuse_gguf(other)
    other.write_bytes(b"else")
    refuse_gguf(other)
    refuse_gguf(Path("x" * 9999))


def test_other_weights_beside_it_are_served(file: Path, tmp_path: Path) -> None:
    (file.parent / "config.json").write_text("{}")
    (file.parent / "model.safetensors").touch()
    assert find_model(str(file.parent), None, tmp_path) == file.parent


def test_models_of_the_hub() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        refuse_gguf_on_hub("org/small", ["README.md", "small-q8.gguf", NAME])
    check(str(caught.value).replace(" of org/small is", " is"), "org/small")
    refuse_gguf_on_hub("org/small", [NAME, "model.safetensors"])
    refuse_gguf_on_hub("org/small", ["config.json"])


@pytest.mark.parametrize(
    ("command", "more"),
    [
        (models.convert_to_safetensors, []),
        (models.download_weights, []),
        (models.quantize, ["out"]),
        (models.convert_to_fast_tokenizer, []),
    ],
)
def test_commands(command: click.Command, more: list[str], file: Path, tmp_path: Path) -> None:
    env = {"HF_HUB_CACHE": str(tmp_path)}
    result = CliRunner().invoke(command, [str(file), *more], env=env)
    assert result.exit_code == 1
    check(result.stderr.splitlines()[-1], str(file.parent))


def test_a_directory_is_not_converted(file: Path, tmp_path: Path) -> None:
    env = {"HF_HUB_CACHE": str(tmp_path)}
    result = CliRunner().invoke(models.convert_to_safetensors, [str(file.parent)], env=env)
    assert result.exit_code == 1
    check(result.stderr.splitlines()[-1], str(file.parent))


def test_the_launcher(file: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "tgis", "launcher", "--model-name", str(file), "--compat", "tgi"]
    done = subprocess.run(
        [*command, "--termination-log", str(log)], capture_output=True, text=True, timeout=60, cwd=file.parent
    )
    assert done.returncode == 1
    check(done.stderr.splitlines()[-1], str(file.parent))
    assert log.read_text() == done.stderr.splitlines()[-1].removeprefix("error: ") + "\n"


def test_transformers_has_what_the_command_names() -> None:
    assert transformers.GgufConfig(dequantize=True).dequantize
    for name in ("AutoModelForCausalLM", "AutoTokenizer"):
        assert hasattr(getattr(transformers, name), "from_pretrained")
    compile(SCRIPT, "command", "exec")
