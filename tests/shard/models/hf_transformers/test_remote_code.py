"""Code that comes with a checkpoint is never imported, whichever engine or tokenizer it is for, unless the
operator trusts it."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.shard.checkpoints import write_llama
from tests.support.shard.driver import configure
from tests.support.tokenizers.older_kinds import write_gpt2
from tgis.cli import models as model_commands
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.startup.load import load

AUTO_MAP = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
TOKENIZER = {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}, "tokenizer_class": "Evil"}


@pytest.fixture(autouse=True)
def modules(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where transformers copies such code to, which would be the user's cache."""
    directory = tmp_path_factory.mktemp("modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(directory))
    return directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """All of its auto classes are in a module that leaves a file where it is imported."""
    write_llama(tmp_path / "model")
    change(tmp_path / "model", auto_map=AUTO_MAP)
    harm = f"import os; os.mkdir({str(tmp_path / 'harm')!r})\n"
    for name in ("evil", "configuration_evil", "modeling_evil", "tokenization_evil"):
        (tmp_path / "model" / f"{name}.py").write_text(harm)
    return tmp_path / "model"


def change(model: Path, **settings: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def check_unharmed(model: Path, modules: Path) -> None:
    assert not (model.parent / "harm").exists()
    assert not list(modules.rglob("*.py")), "it was not even copied"


@pytest.mark.parametrize("framework", [None, "tgis_native", "hf_transformers"])
def test_a_known_type_needs_none_of_it(model: Path, modules: Path, framework: str | None) -> None:
    assert load(configure(model, deployment_framework=framework)).info.vocab_size == 99
    check_unharmed(model, modules)


def test_an_unknown_type_is_refused(model: Path, modules: Path) -> None:
    change(model, model_type="evil", architectures=["Model"])
    with pytest.raises(UnsupportedModelError) as caught:
        load(configure(model))
    text = "its code is part of the checkpoint, and runs only with TRUST_REMOTE_CODE=true"
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    check_unharmed(model, modules)
    with pytest.raises(UnsupportedModelError):
        load(configure(model, trust_remote_code=True))
    assert (model.parent / "harm").exists(), "it would have been seen"


@pytest.mark.parametrize("settings", [TOKENIZER, TOKENIZER | {"tokenizer_class": "GPT2Tokenizer"}])
def test_a_tokenizer_is_not_asked_for_code(model: Path, modules: Path, settings: dict[str, Any]) -> None:
    """The one that transformers knows is taken instead, else there is none."""
    write_gpt2(model)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    done = CliRunner().invoke(model_commands.convert_to_fast_tokenizer, [str(model)], input="y\n" * 9)
    if "GPT2Tokenizer" in settings.values():
        assert (model / "tokenizer.json").is_file()
    else:
        assert done.exit_code == 1
        assert done.stderr.splitlines()[-1].startswith(f"error: the tokenizer of {model} cannot be converted")
    check_unharmed(model, modules)
