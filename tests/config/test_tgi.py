"""TGI's names under --compat tgi. The flags here are copied from its manual, not from our table."""

import pytest

from tests.support.command_line import refusal, run
from tgis.config.option import Secret
from tgis.config.processes import LauncherConfig

FLAGS = """
model-id revision tokenizer-config-path trust-remote-code dtype kv-cache-dtype quantize sharded
num-shard huggingface-hub-cache weights-cache-override disable-custom-kernels rope-scaling rope-factor
max-concurrent-requests max-best-of max-stop-sequences max-top-n-tokens max-input-tokens
max-input-length max-total-tokens max-client-batch-size validation-workers payload-limit
disable-grammar-support enable-prefill-logprobs waiting-served-ratio max-waiting-tokens
max-batch-prefill-tokens max-batch-total-tokens max-batch-size cuda-graphs speculate lora-adapters
watermark-gamma watermark-delta hostname port prometheus-port shard-uds-path master-addr master-port
cuda-memory-fraction json-output otlp-endpoint otlp-service-name api-key ngrok
ngrok-authtoken ngrok-edge usage-stats graceful-termination-timeout env
""".split()
SHARED = """
revision trust-remote-code dtype quantize num-shard max-concurrent-requests max-top-n-tokens
max-waiting-tokens max-batch-size port shard-uds-path master-addr master-port json-output
otlp-endpoint otlp-service-name lora-adapters speculate watermark-gamma watermark-delta env cuda-graphs
cuda-memory-fraction max-input-tokens max-best-of max-stop-sequences max-client-batch-size
disable-grammar-support rope-scaling rope-factor
""".split()
REFUSED = "kv-cache-dtype weights-cache-override ngrok".split()
MAPPED = {
    "api-key": ("s3cret", "auth_tokens", Secret("s3cret")),
    "model-id": ("/m", "model_name", "/m"),
    "huggingface-hub-cache": ("/c", "hf_hub_cache", "/c"),
    "max-input-length": ("50", "max_input_tokens", 50),
    "sharded": ("false", "num_shard", 1),
    "max-total-tokens": ("100", "max_sequence_length", 100),
    "max-batch-prefill-tokens": ("64", "max_step_tokens", 64),
    "max-batch-total-tokens": ("640", "kv_cache_tokens", 640),
    "validation-workers": ("3", "tokenization_workers", 3),
    "hostname": ("::1", "bind", "::1"),
    "graceful-termination-timeout": ("90", "shutdown_timeout", 90.0),
}
SWITCHES = {
    "disable-custom-kernels",
    "enable-prefill-logprobs",
    "ngrok",
}
READ_BY_TGIS = ("disable-custom-kernels", "huggingface-hub-cache")  # as variables
TGI_ONLY = [flag for flag in FLAGS if flag not in SHARED]


def arguments(flag: str, value: str = "1") -> list[str]:
    return [f"--{flag}"] if flag in SWITCHES else [f"--{flag}", value]


def test_the_tables_are_complete() -> None:
    assert {*SHARED, *REFUSED, *MAPPED, *SWITCHES} <= set(FLAGS)


@pytest.mark.parametrize("flag", TGI_ONLY)
def test_without_compat_a_flag_is_a_usage_error_with_a_hint(flag: str) -> None:
    text = refusal(arguments(flag), code=2)
    assert f"--{flag}" in text
    assert "--compat tgi" in text


@pytest.mark.parametrize("flag", [flag for flag in TGI_ONLY if flag not in READ_BY_TGIS])
def test_without_compat_a_variable_is_not_read(flag: str) -> None:
    variable = flag.upper().replace("-", "_")
    config, result = run(LauncherConfig, [], {variable: "true"}, "launcher")
    plain, _ = run(LauncherConfig, [], {}, "launcher")
    assert config == plain
    assert "WARNING" not in result.stderr


@pytest.mark.parametrize("flag", TGI_ONLY)
def test_with_compat_a_flag_is_mapped_warned_about_or_refused(flag: str) -> None:
    compat = ["--compat", "tgi"]
    if flag in REFUSED:
        assert refusal([*compat, *arguments(flag)]).startswith(f"--{flag}: ")
    elif flag in MAPPED:
        value, field, meaning = MAPPED[flag]
        config, result = run(LauncherConfig, [*compat, *arguments(flag, value)], reads="launcher")
        assert getattr(config, field) == meaning, result.output
    else:
        _, result = run(LauncherConfig, [*compat, *arguments(flag)], reads="launcher")
        assert result.exit_code == 0
        assert f"--{flag} has no effect: " in result.stderr


@pytest.mark.parametrize("flag", SHARED)
def test_shared_names_need_no_compat(flag: str) -> None:
    values = {"dtype": "float16", "quantize": "gptq", "watermark-gamma": "0.25", "cuda-memory-fraction": "1"}
    values["rope-scaling"] = "dynamic"
    is_switch = flag in ("json-output", "env", "trust-remote-code", "disable-grammar-support")
    given = [f"--{flag}"] if is_switch else [f"--{flag}", values.get(flag, "5")]
    _, result = run(LauncherConfig, given, reads="launcher")
    assert result.exit_code == 0, result.output


def test_variables_under_compat() -> None:
    env = {"COMPAT": "tgi", "MAX_TOTAL_TOKENS": "77", "HOSTNAME": "pod-1", "PORT": "8080", "NGROK": "false"}
    config, result = run(LauncherConfig, [], env, "launcher")
    assert (config.max_sequence_length, config.bind, config.port) == (77, "0.0.0.0", 8080), result.output
    sagemaker = {"COMPAT": "tgi", "HF_MODEL_ID": "/m", "SM_NUM_GPUS": "2", "HF_MODEL_REVISION": "v1"}
    config, _ = run(LauncherConfig, [], sagemaker, "launcher")
    assert (config.model_name, config.num_shard, config.revision) == ("/m", 2, "v1")
    for text in ("true", "false"):
        trusts = {"COMPAT": "tgi", "HF_MODEL_TRUST_REMOTE_CODE": text}
        assert run(LauncherConfig, [], trusts, "launcher")[0].trust_remote_code == (text == "true")
    config, _ = run(LauncherConfig, [], {"COMPAT": "tgi", "API_KEY": "s3cret"}, "launcher")
    assert config.auth_tokens == Secret("s3cret")


def test_two_names_of_one_option_must_agree() -> None:
    compat = ["--compat", "tgi"]
    text = refusal([*compat, "--max-total-tokens", "9"], {"MAX_SEQUENCE_LENGTH": "8"})
    assert text == "MAX_SEQUENCE_LENGTH and --max-total-tokens are given with different values (8 and 9)"
    text = refusal(compat, {"MODEL_ID": "/a", "HF_MODEL_ID": "/b"})
    assert text == "MODEL_ID and HF_MODEL_ID are given with different values (/a and /b)"
    same = {"MAX_TOTAL_TOKENS": "8", "MAX_SEQUENCE_LENGTH": "8"}
    assert run(LauncherConfig, compat, same, "launcher")[0].max_sequence_length == 8


def test_values_are_read_as_those_of_ours() -> None:
    compat = ["--compat", "tgi"]
    assert "--max-total-tokens" in refusal([*compat, "--max-total-tokens", "many"], code=2)
    assert "at least 2" in refusal([*compat, "--max-total-tokens", "1"])
    assert "must be true or false" in refusal([*compat, "--sharded", "maybe"])
    assert run(LauncherConfig, compat, {"HF_MODEL_QUANTIZE": "gptq"}, "launcher")[0].quantize == "gptq"
    assert "--quantize int8" in refusal(compat, {"HF_MODEL_QUANTIZE": "exl2"}, code=2)


@pytest.mark.parametrize("short", [["-g", "90"], ["-g90"]])
def test_the_short_flag_of_two_meanings(short: list[str]) -> None:
    assert "instead of -g" in refusal(["--compat", "tgi", *short], code=2)
    assert run(LauncherConfig, short)[0].grpc_port == 90
