"""A checkpoint's code is never imported, for any engine or tokenizer, unless the operator trusts it."""

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
    """Return the directory to which transformers copies such code, which would be the user's cache."""
    directory = tmp_path_factory.mktemp("modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(directory))
    return directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model whose auto classes are in a module that writes a file when it is imported."""
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
    assert not list(modules.rglob("*.py")), "the code was not copied"


@pytest.mark.parametrize("framework", [None, "tgis_native", "hf_transformers"])
def test_a_known_type_does_not_use_it(model: Path, modules: Path, framework: str | None) -> None:
    assert load(configure(model, deployment_framework=framework)).info.vocab_size == 99
    check_unharmed(model, modules)


def test_an_unknown_type_is_refused(model: Path, modules: Path) -> None:
    change(model, model_type="evil", architectures=["Model"])
    with pytest.raises(UnsupportedModelError) as caught:
        load(configure(model))
    text = "its code is part of the checkpoint and runs only with TRUST_REMOTE_CODE=true"
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    check_unharmed(model, modules)
    with pytest.raises(UnsupportedModelError):
        load(configure(model, trust_remote_code=True))
    assert (model.parent / "harm").exists(), "an import is noticed"


@pytest.mark.parametrize("settings", [TOKENIZER, TOKENIZER | {"tokenizer_class": "GPT2Tokenizer"}])
def test_a_tokenizer_s_code_is_not_used(model: Path, modules: Path, settings: dict[str, Any]) -> None:
    """transformers' own tokenizer is used instead, if there is one."""
    write_gpt2(model)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    done = CliRunner().invoke(model_commands.convert_to_fast_tokenizer, [str(model)], input="y\n" * 9)
    if "GPT2Tokenizer" in settings.values():
        assert (model / "tokenizer.json").is_file()
    else:
        assert done.exit_code == 1
        assert done.stderr.splitlines()[-1].startswith(f"error: the tokenizer of {model} cannot be converted")
    check_unharmed(model, modules)
