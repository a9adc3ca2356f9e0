"""Resolution of the options of soft prompts and adapters before anything is loaded."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.command_line import run
from tgis.cli import main as cli
from tgis.config.model import AdapterOptions
from tgis.config.processes import LauncherConfig
from tgis.errors import OperatorError
from tgis.hub.startup_adapters import resolve_adapter_options
from tgis.launcher.plan import make_plan

HINT = "use NAME=DIRECTORY for an adapter in a directory"


def write_adapter(directory: Path, **config: object) -> Path:
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
    return directory


def settle(options: AdapterOptions, length: int = 100, cache: Path = Path("/nowhere")) -> AdapterOptions:
    return resolve_adapter_options(options, length, cache)


def refusal(text: str, cache: Path = Path("/nowhere")) -> str:
    with pytest.raises(OperatorError) as error:
        settle(AdapterOptions(lora_adapters=text), cache=cache)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_nothing_is_given_and_nothing_is_made_of_it() -> None:
    assert settle(AdapterOptions()) == AdapterOptions()
    assert settle(AdapterOptions(lora_adapters=" , ,")) == AdapterOptions()


def test_directories_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts").mkdir()
    write_adapter(tmp_path / "a")
    given = AdapterOptions(prefix_store_path="prompts", adapter_cache=".", lora_adapters="x = a ,y/z.1=./a,")
    assert settle(given) == AdapterOptions(
        prefix_store_path=f"{tmp_path}/prompts",
        adapter_cache=f"{tmp_path}",
        lora_adapters=f"x={tmp_path}/a,y/z.1={tmp_path}/a",
    )
    assert settle(settle(given)) == settle(given)


def test_the_longest_prompt_leaves_room_for_a_token() -> None:
    assert settle(AdapterOptions(max_prompt_prefix_length=99)).max_prompt_prefix_length == 99
    with pytest.raises(OperatorError) as error:
        settle(AdapterOptions(max_prompt_prefix_length=100))
    text = "max_prompt_prefix_length (100) must be at most 99, one less than max_sequence_length"
    assert str(error.value) == text


@pytest.mark.parametrize(("refs", "entry"), [("main", "org/a"), ("v2", "org/a@v2"), (None, "org/a@c0ffee")])
def test_adapters_in_the_hub_cache(tmp_path: Path, refs: str | None, entry: str) -> None:
    """Unlike models, they need no config.json."""
    root = tmp_path / "models--org--a"
    snapshot = write_adapter(root / "snapshots" / "c0ffee")
    if refs:
        (root / "refs").mkdir()
        (root / "refs" / refs).write_text("c0ffee\n")
    assert settle(AdapterOptions(lora_adapters=entry), cache=tmp_path).lora_adapters == f"org/a={snapshot}"
    assert "is not in the hub cache" in refusal("org/a@other", tmp_path)
    assert "is not in the hub cache" in refusal("org/b", tmp_path)


def test_directories_without_an_adapter_are_refused(tmp_path: Path) -> None:
    good = write_adapter(tmp_path / "good")
    tuned = write_adapter(tmp_path / "tuned", peft_type="PROMPT_TUNING")
    torn = write_adapter(tmp_path / "torn")
    (torn / "adapter_config.json").write_text('{"peft_type"')
    comma = write_adapter(tmp_path / "a,b")
    (tmp_path / "empty").mkdir()
    assert refusal(f"x={tmp_path}/none") == f"lora_adapters: x: there is no directory {tmp_path}/none"
    assert refusal(f"x={good}@main") == f"lora_adapters: x: there is no directory {good}@main"
    assert refusal(f"x={tmp_path}/empty").endswith("/empty has no adapter_config.json")
    assert refusal(f"x={tuned}").endswith("/tuned is not a LoRA adapter: its peft_type is PROMPT_TUNING")
    assert f"{torn}/adapter_config.json is not valid JSON" in refusal(f"x={torn}")
    assert refusal(f"x={good},y={good},x={good}") == "lora_adapters: x is given twice"
    lacking = f"lacks a name or a directory; {HINT}"
    for entry in (f"={good}", "sql=", "=", " = "):
        assert refusal(entry) == f"lora_adapters: {entry.strip()} {lacking}"
    for name in ("a b", "ä", "a:b", "../a", "a/.b", "/a", "a" * 257):
        assert refusal(f"{name}={good}").startswith(f"lora_adapters: {name!r} is not a valid id")
    assert "there is no directory" in refusal(f"x={comma}")


def test_a_directory_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    good = write_adapter(tmp_path / "store" / "l0")
    for entry in ("store/l0", "store", str(good), f"{good}/", "./store/l0"):
        assert refusal(entry) == f"lora_adapters: {entry} is not in the hub cache; {HINT}"


def test_a_path_with_a_comma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_adapter(tmp_path / "a,b" / "adapter")
    monkeypatch.chdir(tmp_path / "a,b")
    assert "contains a comma, which separates adapters" in refusal("x=adapter")


def test_the_launcher_refuses_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "n_positions": 64}')
    (tmp_path / "tokenizer.json").write_text("{}")
    good = write_adapter(tmp_path / "good")
    config = LauncherConfig(model_name=str(tmp_path), lora_adapters=f"x={good}", max_prompt_prefix_length=63)
    assert make_plan(config).adapters == settle(
        AdapterOptions(lora_adapters=f"x={good}", max_prompt_prefix_length=63), 64
    )
    with pytest.raises(OperatorError):
        make_plan(replace(config, max_prompt_prefix_length=64))
    flags = ["--model-name", str(tmp_path), "--termination-log", str(tmp_path / "log")]
    result = CliRunner().invoke(cli.launcher_main, flags, env={"LORA_ADAPTERS": "y=/none", "HOME": None})
    assert result.exit_code == 1
    line = "lora_adapters: y: there is no directory /none"
    assert result.stderr.splitlines()[-1] == f"error: {line}"
    assert (tmp_path / "log").read_text() == f"{line}\n"


def test_a_shard_refuses_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "n_positions": 64}')
    env = {"HOME": None, "MAX_PROMPT_PREFIX_LENGTH": "64"}
    result = CliRunner().invoke(cli.main.commands["serve"], ["--model-path", str(tmp_path)], env=env)
    assert result.exit_code == 1
    assert "error: max_prompt_prefix_length (64) must be at most 63" in result.stderr


def test_invalid_numbers() -> None:
    for name in ("MAX_PROMPT_PREFIX_LENGTH", "PROMPT_CACHE_SIZE_MB", "ADAPTER_CACHE_SIZE_MB"):
        for text in ("many", "0", "-1", "1.5"):
            config, result = run(LauncherConfig, [], {name: text}, "launcher")
            assert (config, result.exit_code) == (None, 2)
            [line] = result.stderr.splitlines()
            assert name in line


def test_adapters_under_the_names_of_tgi() -> None:
    env = {"COMPAT": "tgi", "MODEL_ID": "m", "LORA_ADAPTERS": "x=/a,org/b"}
    assert run(LauncherConfig, [], env, "launcher")[0].lora_adapters == "x=/a,org/b"
