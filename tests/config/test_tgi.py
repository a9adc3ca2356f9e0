"""TGI's names under --compat tgi. The flags are copied from its manual, not from our table."""

from dataclasses import fields
from typing import Any

import pytest

from tests.support.command_line import refusal, run
from tgis.config.option import Secret
from tgis.config.processes import LauncherConfig

COMPAT = ["--compat", "tgi"]
COMPLETE = [*COMPAT, "--model-id", "org/m"]
NO_EFFECT, REFUSED = "no effect", "refused"
Outcome = dict[str, Any] | str
"""Options that a flag sets, or its other outcome."""

FLAGS: dict[str, tuple[str, Outcome]] = {
    "model-id": ("org/m", {}),
    "revision": ("v1", {"revision": "v1"}),
    "tokenizer-config-path": ("/t.json", {"tokenizer_config_path": "/t.json"}),
    "trust-remote-code": ("", {"trust_remote_code": True}),
    "dtype": ("bfloat16", {"dtype": "bfloat16"}),
    "kv-cache-dtype": ("fp8_e4m3fn", {"kv_cache_dtype": "fp8_e4m3fn"}),
    "quantize": ("gptq", {"quantize": "gptq"}),
    "sharded": ("true", {"sharded": True}),
    "num-shard": ("2", {"num_shard": 2}),
    "huggingface-hub-cache": ("/c", {"hf_hub_cache": "/c"}),
    "weights-cache-override": ("/w", {"model_name": "/w", "served_model_name": "org/m"}),
    "disable-custom-kernels": ("", NO_EFFECT),
    "rope-scaling": ("dynamic", {"rope_scaling": "dynamic"}),
    "rope-factor": ("2", {"rope_factor": 2.0}),
    "max-concurrent-requests": ("7", {"max_concurrent_requests": 7}),
    "max-best-of": ("3", {"max_best_of": 3}),
    "max-stop-sequences": ("8", {"max_stop_sequences": 8}),
    "max-top-n-tokens": ("6", {"max_top_n_tokens": 6}),
    "max-input-tokens": ("50", {"max_input_tokens": 50}),
    "max-input-length": ("50", {"max_input_tokens": 50}),
    "max-total-tokens": ("100", {"max_sequence_length": 100}),
    "max-client-batch-size": ("9", {"max_client_batch_size": 9}),
    "validation-workers": ("3", {"tokenization_workers": 3}),
    "payload-limit": ("5000000", {"max_message_bytes": 5_000_000}),
    "disable-grammar-support": ("", {"disable_grammar_support": True}),
    "enable-prefill-logprobs": ("", NO_EFFECT),
    "waiting-served-ratio": ("1.2", NO_EFFECT),
    "max-waiting-tokens": ("20", NO_EFFECT),
    "max-batch-prefill-tokens": ("64", {"max_step_tokens": 64}),
    "max-batch-total-tokens": ("640", {"kv_cache_tokens": 640}),
    "max-batch-size": ("4", {"max_batch_size": 4}),
    "cuda-graphs": ("1,2,4", {"cuda_graphs": "1,2,4"}),
    "speculate": ("2", {"speculate": 2}),
    "lora-adapters": ("org/a,b=/b", {"lora_adapters": "org/a,b=/b"}),
    "watermark-gamma": ("0.25", {"watermark_gamma": 0.25}),
    "watermark-delta": ("4", {"watermark_delta": 4.0}),
    "hostname": ("::1", {"bind": "::1"}),
    "port": ("80", {"port": 80}),
    "prometheus-port": ("9000", NO_EFFECT),
    "shard-uds-path": ("/s", {"shard_uds_path": "/s"}),
    "master-addr": ("10.0.0.1", {"master_addr": "10.0.0.1"}),
    "master-port": ("29501", {"master_port": 29501}),
    "cuda-memory-fraction": ("0.5", {"cuda_memory_fraction": 0.5}),
    "json-output": ("", {"json_output": True}),
    "otlp-endpoint": ("http://c:4317", {"otlp_endpoint": "http://c:4317"}),
    "otlp-service-name": ("name", {"otlp_service_name": "name"}),
    "cors-allow-origin": ("https://a", {"cors_allow_origin": "https://a"}),
    "api-key": ("s3cret", {"auth_tokens": Secret("s3cret")}),
    "ngrok": ("", REFUSED),
    "ngrok-authtoken": ("t", REFUSED),
    "ngrok-edge": ("e", REFUSED),
    "usage-stats": ("off", NO_EFFECT),
    "graceful-termination-timeout": ("60", {"shutdown_timeout": 60.0}),
    "env": ("", {"env": True}),
}
OF_ITS_ROUTER: dict[str, tuple[str, Outcome]] = {
    "tokenizer-name": ("org/t", {"tokenizer_name": "org/t"}),
    "max-image-fetch-size": ("9", NO_EFFECT),
}
SHARED = {"env", "max-waiting-tokens"} | {
    flag
    for flag, (_, outcome) in {**FLAGS, **OF_ITS_ROUTER}.items()
    if isinstance(outcome, dict) and flag.replace("-", "_") in outcome
}
"""Flags that this service, or TGIS, has too."""
TGI_ONLY = sorted((FLAGS.keys() | OF_ITS_ROUTER.keys()) - SHARED)
READ_BY_TGIS = ("disable-custom-kernels", "huggingface-hub-cache")  # as variables
DEFAULTS = {
    "http_api": "tgi",
    "port": 3000,
    "bind": "0.0.0.0",
    "max_concurrent_requests": 128,
    "max_best_of": 2,
    "max_stop_sequences": 4,
    "max_top_n_tokens": 5,
    "max_client_batch_size": 4,
    "max_message_bytes": 2_000_000,
    "watermark_gamma": 0.5,
    "watermark_delta": 2.0,
    "shutdown_timeout": 90,
}
"""Values of TGI's, according to its manual."""


def configured(*arguments: str, env: dict[str, str] | None = None) -> LauncherConfig:
    config, result = run(LauncherConfig, [*COMPAT, *arguments], env, "launcher")
    assert result.exit_code == 0, result.output
    assert isinstance(config, LauncherConfig)
    return config


def arguments_of(flag: str) -> list[str]:
    value = {**FLAGS, **OF_ITS_ROUTER}[flag][0]
    return [f"--{flag}", value] if value else [f"--{flag}"]


@pytest.fixture(scope="module")
def plain() -> LauncherConfig:
    return configured("--model-id", "org/m")


def test_it_is_the_whole_manual() -> None:
    assert len(FLAGS) == 54


@pytest.mark.parametrize("flag", [*FLAGS, *OF_ITS_ROUTER])
def test_each_flag_sets_its_option(flag: str, plain: LauncherConfig) -> None:
    outcome = {**FLAGS, **OF_ITS_ROUTER}[flag][1]
    if outcome == REFUSED:
        assert refusal([*COMPLETE, *arguments_of(flag)]).startswith(f"--{flag}: ")
        return
    config, result = run(LauncherConfig, [*COMPLETE, *arguments_of(flag)], reads="launcher")
    assert result.exit_code == 0, result.output
    names = [f.name for f in fields(LauncherConfig)]
    changed = {name: getattr(config, name) for name in names if getattr(config, name) != getattr(plain, name)}
    assert changed == ({} if outcome == NO_EFFECT else outcome)
    assert (f"--{flag} has no effect: " in result.stderr) == (outcome == NO_EFFECT)
    assert result.stderr.count(" WARNING ") == (outcome == NO_EFFECT)


@pytest.mark.parametrize("flag", sorted(FLAGS.keys() - {"env", "hostname", "huggingface-hub-cache"}))
def test_its_variable_means_the_same(flag: str) -> None:
    """HOSTNAME is the container's name, ENV is not a variable, and the cache has its own setting."""
    value, outcome = FLAGS[flag]
    name = flag.upper().replace("-", "_")
    if outcome == REFUSED:
        assert refusal(COMPLETE, {name: value or "true"}).startswith(f"{name}: ")
    else:
        flagged = configured("--model-id", "org/m", *arguments_of(flag))
        assert configured("--model-id", "org/m", env={name: value or "true"}) == flagged


@pytest.mark.parametrize("flag", TGI_ONLY)
def test_without_compat_a_flag_is_a_usage_error_with_a_hint(flag: str) -> None:
    text = refusal(arguments_of(flag), code=2)
    assert f"--{flag}" in text
    assert "--compat tgi" in text


@pytest.mark.parametrize("flag", [flag for flag in TGI_ONLY if flag not in READ_BY_TGIS])
def test_without_compat_a_variable_is_not_read(flag: str) -> None:
    variable = flag.upper().replace("-", "_")
    config, result = run(LauncherConfig, [], {variable: "true"}, "launcher")
    plain, _ = run(LauncherConfig, [], {}, "launcher")
    assert config == plain
    assert "WARNING" not in result.stderr


@pytest.mark.parametrize("flag", sorted(SHARED))
def test_shared_names_need_no_compat(flag: str) -> None:
    config, result = run(LauncherConfig, arguments_of(flag), reads="launcher")
    assert result.exit_code == 0, result.output
    outcome = FLAGS.get(flag, OF_ITS_ROUTER.get(flag, ("", {})))[1]
    assert not isinstance(outcome, dict) or outcome.items() <= vars(config).items()


@pytest.mark.parametrize("name", DEFAULTS)
def test_unset_options_have_their_defaults(name: str, plain: LauncherConfig) -> None:
    assert getattr(plain, name) == DEFAULTS[name]


COMMAND_LINES: list[tuple[str, dict[str, str], dict[str, Any]]] = [
    ("--model-id org/zephyr", {}, {"model_name": "org/zephyr"}),
    (
        "--model-id org/mistral --quantize bitsandbytes-nf4 --port 8080",
        {},
        {"quantize": "bitsandbytes-nf4", "port": 8080},
    ),
    ("--model-id /data/m --num-shard 2 -p 80", {}, {"model_name": "/data/m", "num_shard": 2, "port": 80}),
    (
        "--model-id org/m --max-input-length 3000 --max-total-tokens 4096 --max-batch-prefill-tokens 3000",
        {},
        {"max_input_tokens": 3000, "max_sequence_length": 4096, "max_step_tokens": 3000},
    ),
    ("--model-id=org/m --sharded=false --dtype=float16", {}, {"sharded": False, "dtype": "float16"}),
    (
        "--model-id org/m --lora-adapters org/a,org/b@v2 --speculate 3 --cuda-graphs 0",
        {},
        {"lora_adapters": "org/a,org/b@v2", "speculate": 3, "cuda_graphs": "0"},
    ),
    (
        "--model-id org/m --cors-allow-origin https://a --cors-allow-origin=https://b --env",
        {},
        {"cors_allow_origin": "https://a,https://b", "env": True},
    ),
    (
        "--json-output --hostname 0.0.0.0",
        {"MODEL_ID": "org/m", "NUM_SHARD": "4", "PORT": "8080", "HOSTNAME": "pod-1", "API_KEY": "k"},
        {"num_shard": 4, "port": 8080, "bind": "0.0.0.0", "auth_tokens": Secret("k"), "json_output": True},
    ),
    (
        "--port 8080",
        {
            "HF_MODEL_ID": "org/m",
            "SM_NUM_GPUS": "2",
            "HF_MODEL_REVISION": "v1",
            "HF_MODEL_QUANTIZE": "gptq",
            "HF_MODEL_TRUST_REMOTE_CODE": "true",
            "HF_API_TOKEN": "t",
            "MAX_INPUT_TOKENS": "20",
            "NGROK": "false",
        },
        {
            "model_name": "org/m",
            "num_shard": 2,
            "revision": "v1",
            "quantize": "gptq",
            "trust_remote_code": True,
            "hf_token": Secret("t"),
            "max_input_tokens": 20,
        },
    ),
]


@pytest.mark.parametrize(("words", "env", "expected"), COMMAND_LINES)
def test_whole_command_lines(words: str, env: dict[str, str], expected: dict[str, Any]) -> None:
    assert expected.items() <= vars(configured(*words.split(), env=env)).items()


def test_a_switch_may_be_off_in_a_variable() -> None:
    for text in ("true", "false"):
        config = configured("--model-id", "org/m", env={"HF_MODEL_TRUST_REMOTE_CODE": text})
        assert config.trust_remote_code == (text == "true")


def test_there_is_no_default_model() -> None:
    text = refusal(COMPAT, code=2)
    assert text == "Missing option '--model-id': --compat tgi has no default model"


def test_another_directory_of_weights() -> None:
    config = configured(
        "--model-id", "org/m", "--weights-cache-override", "/w", "--served-model-name", "mine"
    )
    assert (config.model_name, config.served_model_name) == ("/w", "mine")
    assert configured("--weights-cache-override", "/w").model_name == "/w"


def test_two_names_of_one_option_must_agree() -> None:
    text = refusal([*COMPLETE, "--max-total-tokens", "9"], {"MAX_SEQUENCE_LENGTH": "8"})
    assert text == "MAX_SEQUENCE_LENGTH and --max-total-tokens are given with different values (8 and 9)"
    text = refusal(COMPAT, {"MODEL_ID": "/a", "HF_MODEL_ID": "/b"})
    assert text == "MODEL_ID and HF_MODEL_ID are given with different values (/a and /b)"
    text = refusal([*COMPLETE, "--max-input-tokens", "5", "--max-input-length", "6"])
    assert text == "--max-input-tokens and --max-input-length are given with different values (5 and 6)"
    same = {"MAX_TOTAL_TOKENS": "8", "MAX_SEQUENCE_LENGTH": "8"}
    assert configured("--model-id", "org/m", env=same).max_sequence_length == 8


def test_values_are_read_as_those_of_ours() -> None:
    assert "--max-total-tokens" in refusal([*COMPLETE, "--max-total-tokens", "many"], code=2)
    assert "at least 2" in refusal([*COMPLETE, "--max-total-tokens", "1"])
    assert "'maybe' is not a valid boolean" in refusal([*COMPLETE, "--sharded", "maybe"], code=2)
    assert "must be > 0" in refusal([*COMPLETE, "--validation-workers", "0"])
    assert "--quantize int8" in refusal(COMPLETE, {"HF_MODEL_QUANTIZE": "exl2"}, code=2)
    assert "requires an argument" in refusal([*COMPLETE, "--cors-allow-origin"], code=2)


@pytest.mark.parametrize("short", [["-g", "90"], ["-g90"]])
def test_the_short_flag_of_two_meanings(short: list[str]) -> None:
    assert "instead of -g" in refusal([*COMPLETE, *short], code=2)
    assert run(LauncherConfig, short)[0].grpc_port == 90
