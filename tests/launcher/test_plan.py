"""The launcher's plan for its configuration, before it starts a process."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from tgis.config.option import Secret
from tgis.config.processes import LauncherConfig
from tgis.hub import model_files
from tgis.hub.cache import CacheConflictError
from tgis.hub.model_files import ModelNotFoundError
from tgis.hub.startup_adapters import AdapterOptionsError
from tgis.launcher.child_configs import ChildConfigs, Start, line_fields, served_name
from tgis.launcher.plan import LaunchError, choose_router_workers, count_shards, make_plan
from tgis.launcher.run_files import RunFiles


@pytest.fixture
def config(tmp_path: Path) -> LauncherConfig:
    write_config(tmp_path, {"max_position_embeddings": 512})
    (tmp_path / "tokenizer.json").write_text("{}")
    return LauncherConfig(model_name=f"{tmp_path}/")


def write_config(directory: Path, content: dict[str, object]) -> None:
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"} | content))


@pytest.mark.parametrize(
    ("of_model", "asked", "length", "source", "is_warned"),
    [
        (512, None, 512, "model", False),
        (512, 100, 100, "user-defined", False),
        (512, 600, 600, "user-defined", True),
        (None, None, 2048, "default", False),
        (None, 4096, 4096, "user-defined", False),
    ],
)
def test_sequence_length_and_its_source(
    config: LauncherConfig,
    caplog: pytest.LogCaptureFixture,
    of_model: int | None,
    asked: int | None,
    length: int,
    source: str,
    is_warned: bool,
) -> None:
    write_config(Path(config.model_name), {"n_positions": of_model})
    with caplog.at_level(logging.INFO):
        assert make_plan(replace(config, max_sequence_length=asked)).max_sequence_length == length
    assert f"max_sequence_length is {length} ({source})" in caplog.text
    assert (f"{asked} is more than the model's 512" in caplog.text) == is_warned


@pytest.mark.parametrize(
    ("asked", "length", "logged"),
    [
        (None, 512, "rope_factor allows a max_sequence_length of 1280, but does not set it"),
        (1280, 1280, None),
        (1281, 1281, "max_sequence_length 1281 is more than the model's 512"),
    ],
)
def test_a_rope_factor_allows_longer_sequences(
    config: LauncherConfig,
    caplog: pytest.LogCaptureFixture,
    asked: int | None,
    length: int,
    logged: str | None,
) -> None:
    write_config(Path(config.model_name), {"n_positions": 512})
    with caplog.at_level(logging.INFO):
        plan = make_plan(replace(config, max_sequence_length=asked, rope_factor=2.5))
    assert plan.max_sequence_length == length
    chosen = ("max_sequence_length is ", "router_workers is ")
    assert [line for line in caplog.messages if not line.startswith(chosen) or line == logged] == (
        [logged] if logged else []
    )


def test_a_model_of_one_token(config: LauncherConfig) -> None:
    write_config(Path(config.model_name), {"n_positions": 1})
    with pytest.raises(LaunchError) as error:
        make_plan(config)
    assert str(error.value) == "max_sequence_length (1) must be at least 2 (1 input + 1 output)"


@pytest.mark.parametrize("model_type", [None, "", 3, ["llama"]])
def test_a_model_must_have_a_type(config: LauncherConfig, model_type: object) -> None:
    write_config(Path(config.model_name), {"model_type": model_type})
    with pytest.raises(
        model_files.ModelNotFoundError, match=r"config\.json has no model_type, the name of the"
    ):
        make_plan(config)


def test_weights_that_cannot_be_looked_at(config: LauncherConfig) -> None:
    """Links are broken, as in a hub cache that was copied without their targets."""
    (Path(config.model_name) / "model.safetensors").symlink_to("/nowhere/blob")
    with pytest.raises(
        model_files.ModelNotFoundError, match=r"model\.safetensors cannot be read: No such file"
    ):
        make_plan(config)


def test_stores_that_cannot_be(config: LauncherConfig) -> None:
    for name in ("prefix_store_path", "adapter_cache"):
        with pytest.raises(AdapterOptionsError, match=r"x cannot be used: File name too long$"):
            make_plan(replace(config, **{name: "x" * 300}))
    for adapter in ("x" * 300, "org/" + "x" * 300 + "@main", f"name=/{'x' * 300}"):
        with pytest.raises(AdapterOptionsError, match=r"^lora_adapters: "):
            make_plan(replace(config, lora_adapters=adapter))


def test_a_tokenizer_must_be_there(config: LauncherConfig) -> None:
    (Path(config.model_name) / "tokenizer.json").unlink()
    with pytest.raises(LaunchError) as error:
        make_plan(config)
    assert str(error.value) == "No existing fast tokenizer (tokenizer.json) found"


@pytest.mark.parametrize(("first", "second"), [("float16", None), (None, "float16"), ("float16", "float16")])
def test_two_names_of_the_type(config: LauncherConfig, first: str | None, second: str | None) -> None:
    assert make_plan(replace(config, dtype=first, dtype_str=second)).dtype == "float16"
    with pytest.raises(LaunchError) as error:
        make_plan(replace(config, dtype="float32", dtype_str="float16"))
    assert str(error.value) == "dtype and dtype_str args both provided with different values"


@pytest.mark.parametrize(
    ("num_shard", "num_gpus", "cuda", "nvidia", "on_cuda"),
    [
        (None, None, None, None, 1),
        (3, None, "0,1", None, 3),
        (None, 3, "0,1", None, 3),
        (2, 2, None, None, 2),
        (None, None, "0,1", "all", 2),
        (None, None, None, "0,1,2", 3),
        (None, None, None, "all", 1),
        (None, None, "GPU-8f3c", None, 1),
        (None, None, "", "0,1,2", 1),
    ],
)
def test_number_of_shards(
    num_shard: int | None, num_gpus: int | None, cuda: str | None, nvidia: str | None, on_cuda: int
) -> None:
    config = LauncherConfig(
        num_shard=num_shard, num_gpus=num_gpus, cuda_visible_devices=cuda, nvidia_visible_devices=nvidia
    )
    assert count_shards(config, is_cuda=True) == on_cuda
    assert count_shards(config, is_cuda=False) == (num_shard or num_gpus or 1)


@pytest.mark.parametrize(
    ("sharded", "num_shard", "devices", "is_cuda", "expected"),
    [
        (False, None, "0,1", True, 1),
        (False, 2, None, True, 2),
        (True, 2, None, False, 2),
        (True, None, "0,1,2", True, 3),
        (True, 1, "0,1", True, "sharded is true, but num_shard is 1: leave out one of them"),
        (
            True,
            None,
            "0",
            True,
            "sharded is true, which needs two or more visible GPUs, not 1: use --num-shard",
        ),
        (True, None, "0,1", False, "sharded is true, which needs two or more visible GPUs, not 0: "),
    ],
)
def test_tgi_s_sharding(
    sharded: bool, num_shard: int | None, devices: str | None, is_cuda: bool, expected: int | str
) -> None:
    config = LauncherConfig(sharded=sharded, num_shard=num_shard, cuda_visible_devices=devices)
    if isinstance(expected, int):
        assert count_shards(config, is_cuda) == expected
        return
    with pytest.raises(LaunchError) as error:
        count_shards(config, is_cuda)
    assert str(error.value).startswith(expected)


@pytest.mark.parametrize(
    ("asked", "cores", "expected", "source"),
    [
        (None, 1, 1, "default on 1 cores"),
        (None, 4, 1, "default on 4 cores"),
        (None, 7, 1, "default on 7 cores"),
        (None, 8, 2, "default on 8 cores"),
        (None, 31, 7, "default on 31 cores"),
        (None, 256, 8, "default on 256 cores"),
        (1, 256, 1, "user-defined"),
        (3, 2, 3, "user-defined"),
    ],
)
def test_number_of_router_workers(
    caplog: pytest.LogCaptureFixture, asked: int | None, cores: int, expected: int, source: str
) -> None:
    with caplog.at_level(logging.INFO):
        assert choose_router_workers(asked, cores) == expected
    assert caplog.messages == [f"router_workers is {expected} ({source})"]


def test_only_the_node_of_the_router_has_workers(config: LauncherConfig) -> None:
    asked = replace(config, router_workers=3)
    assert make_plan(asked).router_workers == 3
    assert make_plan(replace(asked, nnodes=2, node_rank=1)).router_workers == 0
    assert make_plan(replace(asked, headless=True)).router_workers == 0


def test_routers_that_start_again_find_the_tokens_as_they_were(config: LauncherConfig) -> None:
    """A full disk must not prevent a start, and no router may read an incomplete file."""
    config = replace(config, auth_tokens=Secret("one\ntwo"))
    plan = make_plan(config)
    files = RunFiles(plan, None, None)
    try:
        configs = ChildConfigs(config, plan, files)
        path = configs.router(files.path / "addresses").auth_tokens_path
        assert path is not None
        assert Path(path).read_text() == "one\ntwo\n"
        Path(path).write_text("as it was")
        assert configs.router(files.path / "addresses", 1).auth_tokens_path == path
        assert Path(path).read_text() == "as it was"
    finally:
        files.remove()


def test_inputs_leave_room_for_a_token(config: LauncherConfig) -> None:
    assert make_plan(replace(config, max_input_tokens=511)).max_sequence_length == 512
    with pytest.raises(LaunchError) as error:
        make_plan(replace(config, max_input_tokens=100, max_sequence_length=100))
    assert str(error.value) == "max_input_tokens (100) must be less than max_sequence_length (100)"


def test_a_tokenizer_that_is_being_written(config: LauncherConfig) -> None:
    tokenizer = Path(config.model_name) / "tokenizer.json"
    tokenizer.rename(tokenizer.with_name("unfinished-gguf-tokenizer.json"))
    assert make_plan(config).has_fast_tokenizer


def test_another_tokenizer(config: LauncherConfig, tmp_path: Path) -> None:
    model = Path(config.model_name)
    (model / "tokenizer.json").unlink()
    named = replace(config, tokenizer_name="org/t", hf_hub_cache=str(tmp_path / "hub"))
    with pytest.raises(LaunchError, match=r"^tokenizer_name: org/t is neither a directory nor in the hub"):
        make_plan(named)
    snapshot = tmp_path / "hub" / "models--org--t" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    with pytest.raises(LaunchError, match="No existing fast tokenizer"):
        make_plan(named)
    (snapshot / "tokenizer.json").write_text("{}")
    plan = make_plan(named)
    assert (plan.model_path, plan.tokenizer_path, plan.has_fast_tokenizer) == (model, snapshot, True)
    assert make_plan(replace(config, tokenizer_name=str(snapshot))).tokenizer_path == snapshot


def test_a_speculator_beside_the_model(config: LauncherConfig, tmp_path: Path) -> None:
    named = replace(config, speculator="org/heads", hf_hub_cache=str(tmp_path / "hub"))
    text = "speculator: org/heads is neither a directory nor in the hub cache"
    with pytest.raises(ModelNotFoundError, match=f"^{text}$"):
        make_plan(named)
    snapshot = tmp_path / "hub" / "models--org--heads" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    with pytest.raises(ModelNotFoundError, match=rf"^speculator: {snapshot} has no config\.json$"):
        make_plan(named)
    (snapshot / "config.json").write_text("{}")
    plan = make_plan(named)
    assert (plan.model_path, plan.speculator) == (Path(config.model_name), snapshot)
    assert make_plan(config).speculator is None
    # Without drafts, it is neither looked for nor loaded.
    assert make_plan(replace(named, speculate=0, speculator="org/missing")).speculator is None
    assert make_plan(replace(named, speculate=1)).speculator == snapshot
    assert make_plan(replace(config, speculator="mtp")).speculator == Path("mtp")  # the model's own head


@pytest.mark.parametrize(
    "heads",
    [
        {"medusa_num_heads": 3},
        {"model_type": "mlp_speculator"},
        {"architectures": ["LlamaForCausalLMEagle3"]},
    ],
)
def test_a_speculator_names_its_model(
    config: LauncherConfig, tmp_path: Path, heads: dict[str, object]
) -> None:
    """Check TGI's choice: a speculator is given as the model."""
    directory = tmp_path / "heads"
    directory.mkdir()
    asked = replace(config, model_name=str(directory))
    (directory / "config.json").write_text(json.dumps(heads))
    with pytest.raises(ModelNotFoundError, match=r"config\.json has no base_model"):
        make_plan(asked)
    (directory / "config.json").write_text(json.dumps(heads | {"base_model_name_or_path": str(tmp_path)}))
    plan = make_plan(asked)
    assert (plan.model_path, plan.tokenizer_path, plan.speculator) == (tmp_path, tmp_path, directory)
    assert plan.max_sequence_length == 512
    without = make_plan(replace(asked, speculate=0))
    assert (without.model_path, without.base_name, without.speculator) == (tmp_path, str(tmp_path), None)
    files = RunFiles(plan, None, None)
    try:
        configs = ChildConfigs(asked, plan, files)
        shard = configs.shard(0, Start(1, "file"), "127.0.0.1", None)
        assert (shard.model_path, shard.speculator) == (str(tmp_path), str(directory))
        assert configs.router(files.path / "addresses").served_model_name == tmp_path.name
    finally:
        files.remove()
    with pytest.raises(LaunchError, match="is a speculator itself: leave out one of them"):
        make_plan(replace(asked, speculator=str(directory)))


def test_visible_devices_that_do_not_count_are_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        count_shards(LauncherConfig(num_shard=2, cuda_visible_devices="0,1"), is_cuda=False)
        assert not caplog.records
        count_shards(LauncherConfig(cuda_visible_devices="0,1"), is_cuda=False)
    assert "using 1 shard: visible devices are not counted without a GPU" in caplog.text


def test_numbers_of_shards_that_differ() -> None:
    with pytest.raises(LaunchError) as error:
        count_shards(LauncherConfig(num_gpus=2, num_shard=4), is_cuda=True)
    assert str(error.value) == "NUM_GPUS and num_shard are set to different values (2 and 4)"


def test_a_model_in_a_cache_of_any_name(config: LauncherConfig, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--m" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    write_config(snapshot, {})
    (snapshot / "tokenizer.json").write_text("{}")
    named, cache = replace(config, model_name="org/m"), str(tmp_path / "hub")
    assert make_plan(replace(named, transformers_cache=cache)).model_path == snapshot
    assert make_plan(replace(named, huggingface_hub_cache=cache)).model_path == snapshot
    assert make_plan(replace(named, hf_home=str(tmp_path), home="/nobody")).model_path == snapshot
    with pytest.raises(CacheConflictError):
        make_plan(replace(named, transformers_cache=cache, hf_hub_cache="/elsewhere"))
    assert served_name("org/m", make_plan(replace(named, transformers_cache=cache)).model_path) == "org/m"


def test_folders_of_a_path_are_not_shown_to_clients(
    config: LauncherConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (config.model_name, ".", f"../{tmp_path.name}", f"{tmp_path}/x/.."):
        (tmp_path / "x").mkdir(exist_ok=True)
        assert served_name(name, make_plan(replace(config, model_name=name)).model_path) == tmp_path.name


@pytest.mark.parametrize(
    ("grace", "pre_stop", "timeout", "left"),
    [(60.0, 15.0, 40.0, None), (60.0, 15.0, 40.5, "40"), (30.0, 0.0, 30.0, "25"), (3.0, 0.0, 1.0, "0")],
)
def test_draining_fits_into_the_grace_period(
    config: LauncherConfig, grace: float, pre_stop: float, timeout: float, left: str | None
) -> None:
    config = replace(
        config, termination_grace_period=grace, pre_stop_delay=pre_stop, shutdown_timeout=timeout
    )
    if left is None:
        make_plan(config)
    else:
        with pytest.raises(LaunchError, match=f"more than the {left} s that are left"):
            make_plan(config)


@pytest.mark.parametrize(
    ("nodes", "process", "options", "expected"),
    [
        ({}, "router", {}, {"process": "router"}),
        ({}, "router", {"engine_path": None, "worker": 0}, {"process": "router"}),
        ({}, "router", {"engine_path": "/e", "worker": 2}, {"process": "router", "worker": 2}),
        ({}, "engine", {"engine_path": "/e", "worker": 0}, {"process": "engine"}),
        ({}, "shard", {"rank": 3}, {"process": "shard", "rank": 3}),
        ({"nnodes": 2}, "router", {}, {"process": "router", "node": 0}),
        ({"nnodes": 2, "node_rank": 1}, "shard", {"rank": 3}, {"process": "shard", "node": 1, "rank": 3}),
    ],
)
def test_lines_say_which_process_they_are_of(
    config: LauncherConfig,
    nodes: dict[str, int],
    process: str,
    options: dict[str, object],
    expected: dict[str, object],
) -> None:
    """Lines have the node only if there are several, and only as JSON."""
    asked = replace(config, json_output=True, **nodes)  # type: ignore[arg-type]
    assert line_fields(asked, process, options) == expected
    assert line_fields(replace(asked, json_output=False), process, options) is None


def test_names_of_models_in_gguf_form_are_those_of_their_files(tmp_path: Path) -> None:
    file, made = tmp_path / "models" / "small-q8.gguf", tmp_path / "made"
    for directory in (file.parent, made):
        directory.mkdir()
    file.touch()
    (made / file.name).symlink_to(file)
    assert served_name(str(file), made) == "small-q8"
    assert served_name(f"{file.parent}/", made) == "models"
    assert served_name("org/m:small-q8.gguf", made) == "org/m:small-q8.gguf"
    assert served_name("org/m", made) == "org/m"
