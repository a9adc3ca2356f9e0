"""The commands generated from the declarations of options: sources of values, and refusals."""

import functools
import json
import re
import subprocess
import sys
from dataclasses import MISSING, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import click
import pytest
from click.testing import CliRunner, Result

from tests.support.command_line import BLANK, REQUIRED, TYPES, parse, refusal, run
from tgis.cli import main as cli
from tgis.cli.process_command import process_command
from tgis.config.model import ENGINES, QUANTIZATIONS
from tgis.config.option import Group, Secret, declared, env_of, flag_of, to_flags
from tgis.config.processes import LauncherConfig, LinkOptions, RouterConfig, ShardConfig
from tgis.router.api.fmaas.rules import FMAAS

SHARD = ShardConfig(model_path="/models/x", uds_path="/tmp/shard")
ROUTER = RouterConfig(tokenizer_path="/models/x", shard_uds_path="/tmp/shard")


def test_defaults_of_the_contract() -> None:
    config = parse(LauncherConfig, [])
    assert (config.port, config.grpc_port, config.max_concurrent_requests) == (3000, 8033, 512)
    assert (config.max_new_tokens, config.default_include_stop_seqs, config.bind) == (None, True, "0.0.0.0")
    assert FMAAS.max_new_tokens == 1024
    assert (config.max_top_n_tokens, config.log_text_chars, config.max_guided_bytes) == (10, 0, 65536)
    router = parse(RouterConfig, ["--tokenizer-path", "/models/x"])
    assert (router.max_sequence_length, router.otlp_service_name) == (
        2048,
        "text-generation-inference.router",
    )
    assert f"{router.shard_uds_path}-0" == "/tmp/text-generation-0"


@pytest.mark.parametrize(
    ("variable", "value", "field", "meaning"),
    [
        ("MODEL_NAME", "/models/x", "model_name", "/models/x"),
        ("GRPC_PORT", "50055", "grpc_port", 50055),
        ("JSON_OUTPUT", "true", "json_output", True),
        ("JSON_OUTPUT", "false", "json_output", False),
        ("DEFAULT_INCLUDE_STOP_SEQS", "false", "default_include_stop_seqs", False),
        ("DTYPE_STR", "float16", "dtype_str", "float16"),
        ("NUM_GPUS", "2", "num_gpus", 2),
        ("HF_HUB_CACHE", "/cache", "hf_hub_cache", "/cache"),
        ("TRANSFORMERS_CACHE", "/cache", "transformers_cache", "/cache"),
        ("CUDA_VISIBLE_DEVICES", "0,1", "cuda_visible_devices", "0,1"),
        ("TERMINATION_LOG_DIR", "/tmp/no/log", "termination_log", "/tmp/no/log"),
        ("OTLP_SERVICE_NAME", "x", "otlp_service_name", "x"),
    ],
)
def test_environment(variable: str, value: str, field: str, meaning: object) -> None:
    assert getattr(parse(LauncherConfig, [], {variable: value}), field) == meaning


def two_values(f: Any, option: Any, hint: Any) -> tuple[str, str]:
    """Return two texts that the option accepts, neither of them its default."""
    if option.choices:
        return option.choices[0], option.choices[-1]
    is_small = option.maximum is not None and option.maximum < 42
    if int in (hint, *get_args(hint)):
        return ("6", "7") if is_small else ("41", "42")
    if float in (hint, *get_args(hint)):
        return ("0.25", "0.75") if is_small else ("41.5", "42.5")
    return ("error", "debug") if f.name == "log_level" else ("/a", "/b")


EACH = [
    pytest.param(config_type, f, option, hint, id=f"{config_type.__name__}.{f.name}")
    for config_type in REQUIRED
    for f, option, hint in declared(config_type)
]


@functools.cache
def reporting_command(config_type: type) -> click.Command:
    return process_command("test", config_type, None, "")


def report(config_type: type, flags: list[str], env: dict[str, str | None]) -> list[str]:
    test = reporting_command(config_type)
    arguments = flags if REQUIRED[config_type][:1] == flags[:1] else [*REQUIRED[config_type], *flags]
    result = CliRunner().invoke(test, arguments, env={**BLANK, **env}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


@functools.cache
def default_report(config_type: type) -> list[str]:
    return report(config_type, [], {})


def shown(name: str, lines: list[str]) -> list[str]:
    """Return value and source of an option according to a report of settings."""
    [line] = [line for line in lines if line.startswith(f"  {name}: ")]
    return line.removeprefix(f"  {name}: ").rsplit(" ", 1)


@pytest.mark.parametrize(("config_type", "f", "option", "hint"), EACH)
def test_a_flag_goes_before_the_environment(config_type: type, f: Any, option: Any, hint: Any) -> None:
    flag, variable = flag_of(f), env_of(f)
    if f.default is not MISSING:
        default = "unset" if f.default is None else str(f.default)
        assert shown(f.name, default_report(config_type)) == [default, "(default)"]
    first, second = two_values(f, option, hint)
    is_bool = bool in (hint, *get_args(hint))
    if is_bool:
        first, second = ("False", "true") if option.takes_value else ("True", "false")
    env: dict[str, str | None] = {}
    if variable and f.default is not MISSING:
        env = {variable: second}
        meaning = second.capitalize() if is_bool else second
        if Secret in get_args(hint):
            meaning = "(hidden)"
        assert shown(f.name, report(config_type, [], env)) == [meaning, f"({variable})"]
    if option.flag:
        flags = [flag] if is_bool and not option.takes_value else [flag, first.lower()]
        assert shown(f.name, report(config_type, flags, env)) == [first, f"({flag})"]


@pytest.mark.parametrize(
    "config",
    [
        SHARD,
        replace(SHARD, dtype="float16", kv_cache_tokens=100, rank=1, world_size=2, rendezvous="/r", epoch=3),
        replace(SHARD, prefix_store_path="/p q", adapter_cache="/a", lora_adapters="x=/a,y/z=/b c"),
        replace(SHARD, prompt_cache_size_mb=1, max_prompt_prefix_length=9, adapter_cache_size_mb=2),
        ROUTER,
        replace(ROUTER, output_special_tokens=True, default_include_stop_seqs=False, decode_step_ms=12.5),
        replace(ROUTER, tls_cert_path="/c", tls_key_path="/k", otlp_endpoint="http://c:4317"),
        replace(ROUTER, tls_cert_path="/c", tls_key_path="/k", http_tls=True),
        LauncherConfig(json_output=True, max_sequence_length=99),
    ],
)
def test_flags_carry_a_configuration_to_a_child(config: object) -> None:
    assert parse(type(config), to_flags(config)) == config


def test_a_child_looks_for_the_name_of_its_traces_itself() -> None:
    config = replace(ROUTER, otlp_service_name=None)
    assert parse(RouterConfig, to_flags(config), {"OTEL_SERVICE_NAME": "y"}).otlp_service_name == "y"


def test_every_option_is_declared_once() -> None:
    """Options of one name have one declaration, whatever command they belong to."""
    # The launcher's are optional or derived; the shard needs a path of its tokenizer.
    other = {"shard_uds_path", "num_shard", "max_sequence_length", "otlp_service_name", "tokenizer_path"}
    other.add("router_workers")
    by_name: dict[str, object] = {}
    for config_type in REQUIRED:
        for f, option, _ in declared(config_type):
            if f.name not in other or config_type is ShardConfig:
                assert by_name.setdefault(f.name, option) is option
    shared = {f.name for f in fields(LauncherConfig)}
    shared |= {f.name for f in fields(LinkOptions)}
    assert {f.name for f in fields(RouterConfig)} - shared == {
        "tokenizer_path",
        "shard_addresses",
        "adapter_roots",
        "engine_path",
        "worker",
        "metrics_dir",
        "http_url_path",
        "model_sampling_path",
        "ready_text",  # an inherited variable of the router alone
        "heartbeat_fd",
    }


PROGRAMS = (cli.launcher_main, cli.router_main, cli.server_main, cli.main)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_help_and_version_have_the_short_flags_of_the_original(program: click.Command) -> None:
    """Also if a required option is missing."""
    short, long = (CliRunner().invoke(program, [flag]) for flag in ("-h", "--help"))
    assert short.stdout.startswith("Usage: ")
    assert (short.exit_code, short.stdout, short.stderr) == (0, long.stdout, "")
    for flag in ("-V", "--version"):
        result = CliRunner().invoke(program, [flag])
        assert (result.exit_code, result.stderr) == (0, "")
        assert result.stdout.endswith(f", version {version('tgis-next')}\n")


def test_an_engine_process_needs_its_socket() -> None:
    result = CliRunner().invoke(cli.main, ["engine", "--tokenizer-path", "/x"])
    assert (result.exit_code, result.stderr) == (2, "error: Missing option '--engine-path'.\n")


def test_commands_below_a_group_have_the_short_flag_for_help() -> None:
    for name in ("serve", "launcher", "health-probe", "download-weights"):
        result = CliRunner().invoke(cli.main, [name, "-h"])
        assert (result.exit_code, result.stdout[:7]) == (0, "Usage: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--port", "70000"],
        ["--dtype", "int3"],
        ["--max-top-n-tokens", "0"],
        ["--num-shard", "x"],
        ["--decode-step-ms", "nan"],
        ["--shutdown-timeout", "inf"],
        ["--deployment-framework", "tensorflow"],
        ["--quantize", "exl2"],
        ["--log-level", "loud"],
        ["--default-include-stop-seqs", "perhaps"],
        ["--nonsense"],
    ],
)
def test_bad_flags_are_one_line(arguments: list[str], tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    result = CliRunner().invoke(cli.launcher_main, ["--termination-log", str(log), *arguments])
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert arguments[0] in line
    if arguments != ["--nonsense"]:  # which is detected before any option is parsed
        assert log.read_text() == line.removeprefix("error: ") + "\n"


@pytest.mark.parametrize(
    ("arguments", "env", "code", "text"),
    [
        (["--json-output", "--tls-cert-path", "/x"], {}, 1, "error: tls: must provide both cert and key"),
        (["--port", "many", "--json-output"], {}, 2, "error: Invalid value for '--port'"),
        (["--nonsense"], {"JSON_OUTPUT": "true"}, 2, "error: No such option"),
        (["--num-gpus", "x", "--json-output"], {}, 1, "error: NUM_GPUS must be a positive integer"),
    ],
)
def test_the_last_line_is_an_object_where_lines_are(
    arguments: list[str], env: dict[str, str], code: int, text: str, tmp_path: Path
) -> None:
    """Also if not all options were parsed; the termination log has the text."""
    log = tmp_path / "termination-log"
    result = CliRunner().invoke(cli.launcher_main, ["--termination-log", str(log), *arguments], env=env)
    assert result.exit_code == code
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    assert {line["process"] for line in lines} == {"launcher"}
    assert lines[-1]["level"] == "CRITICAL"
    assert lines[-1]["message"].startswith(text)
    if "--nonsense" not in arguments:  # which is detected before any option is parsed
        assert log.read_text() == lines[-1]["message"].removeprefix("error: ") + "\n"
    text = (
        CliRunner()
        .invoke(cli.server_main, ["health-probe", "--nonsense"], env={"JSON_OUTPUT": "true"})
        .stderr
    )
    assert text.startswith("error: "), "this command has no such option"


@pytest.mark.parametrize("text", ["1", "True", "yes", "", " ", "on", "TRUE"])
def test_booleans_in_the_environment_are_true_or_false(text: str) -> None:
    for variable in ("JSON_OUTPUT", "OUTPUT_SPECIAL_TOKENS", "DEFAULT_INCLUDE_STOP_SEQS"):
        assert variable in refusal([], {variable: text}, code=2)


def test_blank_variables() -> None:
    unset = ("REVISION", "TLS_CERT_PATH", "DTYPE", "HF_HOME", "CUDA_VISIBLE_DEVICES", "MAX_WAITING_TOKENS")
    config, result = run(LauncherConfig, [], dict.fromkeys(unset, " "), "launcher")
    assert result.exit_code == 0
    assert "WARNING" not in result.stderr
    assert (config.revision, config.dtype, config.tls_cert_path, config.cuda_visible_devices) == (None,) * 4
    for variable in ("PORT", "MAX_SEQUENCE_LENGTH", "MODEL_NAME", "DECODE_STEP_MS", "LOG_LEVEL"):
        assert variable in refusal([], {variable: ""}, code=2)
    assert refusal([], {"NUM_GPUS": ""}) == "NUM_GPUS must be a positive integer"


EXACT_TEXTS = [
    (["--max-concurrent-requests", "0"], {}, "max_concurrent_requests must be > 0"),
    (["--max-new-tokens", "0"], {}, "max_new_tokens (0) must be at least 1"),
    ([], {"MAX_NEW_TOKENS": "0"}, "max_new_tokens (0) must be at least 1"),
    (
        ["--max-sequence-length", "1"],
        {},
        "max_sequence_length (1) must be at least 2 (1 input + 1 output)",
    ),
    (["--tokenization-workers", "0"], {}, "tokenization_workers must be > 0"),
    (["--num-shard", "0"], {}, "`num_shard` / NUM_GPUS cannot be < 1"),
    ([], {"NUM_GPUS": "0"}, "`num_shard` / NUM_GPUS cannot be < 1"),
    ([], {"NUM_GPUS": "two"}, "NUM_GPUS must be a positive integer"),
    (["--tls-cert-path", "/c"], {}, "tls: must provide both cert and key"),
    ([], {"TLS_KEY_PATH": "/k"}, "tls: must provide both cert and key"),
    (
        ["--tls-client-ca-cert-path", "/a"],
        {},
        "tls: cannot provide client ca cert without keypair",
    ),
    (
        ["--tls-client-ca-cert-path", "/a", "--tls-key-path", "/k"],
        {},
        "tls: must provide both cert and key",
    ),
    (
        ["--max-prefill-padding", "1.5"],
        {},
        "max_prefill_padding (1.5) must be a percentage in the range [0.0, 1.0]",
    ),
]
LAUNCHER_TEXTS = [
    (["-c", "0"], {}, "cuda_process_memory_fraction must be in range 0 < x <= 1"),
    (
        [],
        {"CUDA_PROCESS_MEMORY_FRACTION": "1.01"},
        "cuda_process_memory_fraction must be in range 0 < x <= 1",
    ),
    ([], {"ESTIMATE_MEMORY": "maybe"}, "valid options for ESTIMATE_MEMORY are auto, manual, and off"),
]


@pytest.mark.parametrize(("arguments", "env", "text"), EXACT_TEXTS + LAUNCHER_TEXTS)
def test_refusals_in_the_words_of_the_original(
    arguments: list[str], env: dict[str, str], text: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    assert refusal([*arguments, "--termination-log", str(log)], env) == text
    assert log.read_text() == text + "\n"
    is_routers = (arguments, env, text) in EXACT_TEXTS and "NUM_GPUS" not in text
    if is_routers:
        assert refusal(arguments, env, reads="router") == text


LINK_FILES = ["--link-cert-path", "/c", "--link-key-path", "/k", "--link-ca-cert-path", "/a"]
NOT_ENCRYPTED = "link: TCP needs --link-cert-path, --link-key-path and --link-ca-cert-path"
NO_ADDRESS = "link: cert, key and ca cert are used only over TCP, and no address is given"


def test_encryption_is_whole_or_refused() -> None:
    text = "tls: --http-tls needs --tls-cert-path and --tls-key-path"
    for reads in ("launcher", "router"):
        assert refusal(["--http-tls"], reads=reads) == text
    for reads, address in (("router", "--shard-addresses"), ("serve", "--listen-address")):
        for missing in (0, 2, 4):
            files = LINK_FILES[:missing] + LINK_FILES[missing + 2 :]
            assert refusal([address, "a:1", *files], reads=reads) == NOT_ENCRYPTED
            assert refusal(files, reads=reads) == NO_ADDRESS
        assert refusal([address, "a:1"], reads=reads) == NOT_ENCRYPTED
        assert refusal(LINK_FILES, reads=reads) == NO_ADDRESS
    several = [*LINK_FILES, "--shard-addresses", "a:1,b:1"]
    text = "link: 2 addresses are given for 3 shards"
    assert refusal([*several, "--num-shard", "3"], reads="router") == text
    for flags in ([], ["--num-shard", "2"]):
        assert run(RouterConfig, [*several, *flags, *REQUIRED[RouterConfig]])[0].shard_addresses == "a:1,b:1"


LARGEST = 2**31 - 1
LIMITS = {
    "num_shard": 1024,
    "num_gpus": 1024,
    "cpu_threads": 1024,
    "max_batch_size": 65_536,
    "max_concurrent_requests": 100_000,
    "router_workers": 64,
    **dict.fromkeys(("port", "grpc_port", "http_api_port"), 65_535),
    **dict.fromkeys(("kv_cache_memory_fraction", "cuda_memory_fraction"), 1),
    "master_port": 65_534,
    "steps_in_flight": 8,
    "speculate": 16,
    "watermark_gamma": 0.99,
    "watermark_delta": 100,
}


def test_numbers_without_bounds_are_refused() -> None:
    """The refusal names the option and its limit; the limit itself is accepted."""
    read: list[LauncherConfig] = []
    test = process_command("test", LauncherConfig, read.append, "", reads="launcher")

    def start(*flags: str, **env: str) -> Result:
        return CliRunner().invoke(test, flags, env={**BLANK, **env}, catch_exceptions=False)

    limits = {
        f.name: LIMITS.get(f.name, LARGEST)
        for f, _, hint in declared(LauncherConfig)
        if {int, float} & {hint, *get_args(hint)}
    }
    for name, limit in limits.items():
        flag = "--" + name.replace("_", "-")
        expected = rf"error: Invalid value for '{flag}' .*: (\S+) is .*\b{limit}(\.0)?\.\n"
        results = {limit + 1: start(flag, str(limit + 1))}
        if name in ("block_size", "max_batch_size", "keepalive_time"):
            results[10**30] = start(**{name.upper(): str(10**30)})
        for number, result in results.items():
            match = re.fullmatch(expected, result.stderr)
            assert match, result.stderr
            assert (result.exit_code, float(match[1])) == (2, float(number))
    assert not read
    at_limit = {name: limit for name, limit in limits.items() if name not in ("node_rank", "http_api_port")}
    at_limit |= {"master_port": 65_534, "grpc_port": 1}
    flags = [f"--{name.replace('_', '-')}={limit}" for name, limit in at_limit.items()]
    assert start(*flags, *LINK_FILES).exit_code == 0
    assert {name: getattr(read[0], name) for name in at_limit} == at_limit


def test_addresses_and_ports_of_their_own() -> None:
    for blank in ("", " "):
        assert refusal(["--bind", blank]) == "bind: the address is empty; 0.0.0.0 means all addresses"
    same = ["--port", "5000", "--grpc-port", "5000"]
    for reads in ("launcher", "router"):
        text = "port and grpc_port are both 5000: HTTP and gRPC need separate ports"
        assert refusal(same, reads=reads) == text
    assert parse(LauncherConfig, ["--port", "0", "--grpc-port", "0"]).port == 0
    assert parse(LauncherConfig, [*same, *LINK_FILES, "--headless"]).headless, "it has one port"
    assert parse(LauncherConfig, [*same, *LINK_FILES, "--nnodes", "2", "--node-rank", "1"]).node_rank == 1
    assert "is not in the range" in refusal(["--port", "70000"], code=2)


def test_groups_of_nodes() -> None:
    """Also with LeaderWorkerSet's variables; a single node may have certificates for more."""
    for flags in (["--nnodes", "2"], ["--headless"], ["--nnodes", "2", *LINK_FILES[2:]]):
        assert refusal(flags) == NOT_ENCRYPTED
    for rank, num_nodes in ((1, 1), (2, 2)):
        flags = ["--node-rank", str(rank)]
        more = ["--nnodes", "2", *LINK_FILES] if num_nodes == 2 else []
        assert refusal([*flags, *more]) == f"node_rank {rank} is out of range for {num_nodes} nodes"
    variables = {"LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "first.group.ns", "LINK_SERVER_NAME": "link"}
    config = run(LauncherConfig, LINK_FILES, {**variables, "LWS_GROUP_SIZE": "3"})[0]
    assert (config.nnodes, config.node_rank, config.master_addr) == (3, 1, "first.group.ns")
    assert (config.master_port, config.link_server_name, config.headless) == (29500, "link", False)
    alone = run(LauncherConfig, LINK_FILES, {**variables, "LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"})[0]
    assert alone.nnodes == 1


@pytest.mark.parametrize("name", ["ibm_fms", "ds_inference"])
def test_engines_that_are_not_served(name: str) -> None:
    for reads in ("launcher", "serve"):
        assert "use tgis_native" in refusal([], {"DEPLOYMENT_FRAMEWORK": name}, reads=reads)


@pytest.mark.parametrize(
    ("name", "warning"),
    [
        ("hf_transformers", None),
        ("tgis_native", None),
        ("hf_optimum_ort", None),
        ("hf_custom_tp", "older name of tgis_native"),
        ("hf_accelerate", "means hf_transformers"),
        ("hf_optimum_bt", "BetterTransformer no longer exists"),
    ],
)
def test_engines_that_are_served(name: str, warning: str | None) -> None:
    config, result = run(LauncherConfig, ["--deployment-framework", name], reads="launcher")
    assert config.deployment_framework == name
    assert ("WARNING" in result.stderr) == (warning is not None)
    assert (warning or "") in result.stderr
    assert name in ENGINES


def test_code_of_a_checkpoint_is_trusted_when_it_is_said() -> None:
    for config_type in (LauncherConfig, ShardConfig):
        assert not parse(config_type, REQUIRED[config_type]).trust_remote_code
        trusting = parse(config_type, REQUIRED[config_type], {"TRUST_REMOTE_CODE": "true"})
        assert trusting.trust_remote_code
        assert "--trust-remote-code" in to_flags(trusting)
    assert "neither true nor false" in refusal([], {"TRUST_REMOTE_CODE": "yes"}, code=2)


@pytest.mark.parametrize("method", QUANTIZATIONS)
def test_methods_that_are_served(method: str) -> None:
    for config_type in (LauncherConfig, ShardConfig):
        required = REQUIRED[config_type]
        assert parse(config_type, [*required, "--quantize", method]).quantize == method
        assert parse(config_type, required, {"QUANTIZE": method}).quantize == method


@pytest.mark.parametrize("reads", ["launcher", "serve"])
@pytest.mark.parametrize(
    "method", "exl2 gguf aqlm hqq nvfp4 marlin_24 sparse llm-awq squeezellm gptq_marlin GPTQ".split()
)
def test_quantization_methods_of_other_servers_are_refused_with_advice(reads: str, method: str) -> None:
    advice = "Serve a GPTQ, AWQ, compressed-tensors, fp8 or bitsandbytes checkpoint of the model, or the "
    for message in (
        refusal(["--quantize", method], code=2, reads=reads),
        refusal([], {"QUANTIZE": method}, code=2, reads=reads),
    ):
        assert f"'{method}' is not one of 'int8'" in message
        assert advice in message


@pytest.mark.parametrize(
    ("text", "level", "is_warned"),
    [
        ("info", "info", False),
        ("WARN", "warning", False),
        ("warning", "warning", False),
        ("trace", "debug", True),
        ("off", "error", True),
        ("info,text_generation_router=debug", "info", True),
        ("text_generation_router=debug,h2=error", "debug", True),
        ("error, tower=trace", "error", True),
    ],
)
def test_levels_as_tracing_filters(text: str, level: str, is_warned: bool) -> None:
    config, result = run(LauncherConfig, [], {"LOG_LEVEL": text})
    assert config.log_level == level
    assert (f"is read as {level}" in result.stderr) == (is_warned and level != "error")


def test_the_flag_that_may_have_a_value() -> None:
    for arguments, meaning in [
        (["--default-include-stop-seqs", "--json-output"], True),
        (["--default-include-stop-seqs", "false"], False),
        (["--default-include-stop-seqs=true"], True),
    ]:
        config = parse(LauncherConfig, arguments, {"DEFAULT_INCLUDE_STOP_SEQS": str(not meaning).lower()})
        assert config.default_include_stop_seqs is meaning


def test_one_shard_as_the_original_was_started(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    serve = cli.main.commands["serve"]

    def start(arguments: list[str], env: dict[str, str] | None = None) -> Result:
        return CliRunner().invoke(serve, arguments, env={"RANK": None, "WORLD_SIZE": None, **(env or {})})

    missing = start([str(tmp_path), "tgis_native", "--sharded"])
    assert missing.exit_code == 1
    assert missing.stderr == "error: RANK must be set when sharded is True\n"
    missing = start([str(tmp_path), "--sharded"], {"RANK": "0"})
    assert missing.stderr == "error: WORLD_SIZE must be set when sharded is True\n"
    assert "use tgis_native" in start([str(tmp_path), "ibm_fms"]).stderr
    assert "Model nobody/x not found" in start(["nobody/x"]).stderr
    nothing = start([])
    assert nothing.exit_code == 2
    assert "--model-path" in nothing.stderr
    result = start([str(tmp_path)])  # continues to the model, which does not exist
    assert f"{tmp_path}" in result.stderr or "model" in result.stderr
    assert result.exit_code == 1


def test_commands_that_only_talk_import_no_torch() -> None:
    """These modules would take seconds to import."""
    code = (
        "import sys, tgis.cli.main, tgis.launcher, tgis.router.app; import tgis.cli.client.command; "
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


@pytest.mark.parametrize(
    ("name", "first"),
    [("launcher", "--model-name"), ("router", "--tokenizer-path"), ("serve", "--model-path")],
)
def test_help_is_in_groups(name: str, first: str) -> None:
    """Each option is listed once, under the heading of its declaration; the model comes first."""
    result = CliRunner().invoke(cli.main, [name, "--help"], terminal_width=200)
    parts = re.split(r"^(\w.*):$", result.output, flags=re.MULTILINE)[1:]
    listed = {
        heading: re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE)
        for heading, text in zip(parts[::2], parts[1::2], strict=True)
    }
    assert list(listed) == [group.value for group in Group if group.value in listed] + ["Options"]
    assert listed["Model"][0] == first
    assert listed.pop("Options") == ["--version", "--help"]
    heading_of = {flag: heading for heading, flags in listed.items() for flag in flags}
    for f, option, _ in declared(TYPES[name]):
        assert option.group is not None, f.name
        assert not option.flag or heading_of[flag_of(f)] == option.group.value
    visible = [p for p in cli.main.commands[name].params if isinstance(p, click.Option) and not p.hidden]
    assert len(visible) - 1 == len(heading_of) == sum(map(len, listed.values()))  # --version has no group


def test_every_command_has_help() -> None:
    for one in cli.main.commands.values():
        assert isinstance(one, click.Command)
        assert one.help
