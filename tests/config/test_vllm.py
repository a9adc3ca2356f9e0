"""vLLM's names under --compat vllm. The names are copied from its manual, not from our table."""

from dataclasses import fields
from typing import Any

import pytest

from tests.support.command_line import refusal, run
from tgis.config.option import Secret
from tgis.config.processes import LauncherConfig

COMPAT = ["--compat", "vllm"]
COMPLETE = [*COMPAT, "--model", "m"]
PLAIN = {
    "http_api": "openai",
    "port": 8000,
    "num_shard": 1,
    "metrics_alias": "vllm",
    "compat": "vllm",
    "model_name": "m",
}
TWO = ['{"name": "b", "path": "/b", "base_model_name": "m"}', "c=/c"]
NGRAM = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'
HEADS = '{"model": "org/heads", "num_speculative_tokens": 5}'
ALL_HEADS = '{"method": "medusa", "model": "org/heads"}'
EAGLE = '{"method": "eagle3", "model": "org/heads", "num_speculative_tokens": 5}'
MTP = '{"method": "mtp", "num_speculative_tokens": 1}'
SUFFIX = '{"method": "suffix", "model": "org/heads", "num_speculative_tokens": 5}'
TLS = {"tls_cert_path": "/c", "tls_key_path": "/k", "http_tls": True}

MEANINGS: list[tuple[list[str], dict[str, Any]]] = [
    (["org/model"], {"model_name": "org/model"}),
    (["org/model", "--max-num-seqs", "8"], {"model_name": "org/model", "max_batch_size": 8}),
    (["--model", "/m"], {"model_name": "/m"}),
    (["--served-model-name", "a", "b/c"], {"served_model_name": "a,b/c"}),
    (["--served-model-name=a", "--seed", "3"], {"served_model_name": "a"}),
    (["--host", "::1"], {"bind": "::1"}),
    (["--port", "9"], {"port": 9}),
    (["--api-server-count", "3"], {"router_workers": 3}),
    (["-asc=1"], {"router_workers": 1}),
    (["--api-key", "a", "b"], {"auth_tokens": Secret("a\nb")}),
    (["--revision", "v1"], {"revision": "v1"}),
    (["--trust-remote-code"], {"trust_remote_code": True}),
    (["--trust_remote_code", "true"], {"trust_remote_code": True}),
    (["--trust-remote-code=False"], {}),
    (["--no-trust-remote-code"], {}),
    (["--download-dir", "/d"], {"hf_hub_cache": "/d"}),
    (["--tokenizer", "org/t"], {"tokenizer_name": "org/t"}),
    (["--hf-token", "t"], {"hf_token": Secret("t")}),
    (["--dtype", "auto"], {}),
    (["--dtype=half"], {"dtype": "float16"}),
    (["--dtype", "float"], {"dtype": "float32"}),
    (["--dtype", "bfloat16"], {"dtype": "bfloat16"}),
    (["--max-model-len", "4096"], {"max_sequence_length": 4096}),
    (["--max_model_len=8K"], {"max_sequence_length": 8192}),
    (["--max-model-len", "1.5k"], {"max_sequence_length": 1500}),
    (["--max-model-len", "auto"], {}),
    (["--max-model-len", "-1"], {}),
    (["--max-num-seqs", "1k"], {"max_batch_size": 1000}),
    (["--scheduling-policy", "fcfs"], {}),
    (["--scheduling-policy", "priority"], {"priority_floor": -(2**31)}),
    (["--max-num-batched-tokens", "16K"], {"max_step_tokens": 16384}),
    (["--gpu-memory-utilization", "0.85"], {"cuda_memory_fraction": 0.85}),
    (["--num-gpu-blocks-override", "10"], {"kv_cache_tokens": 160}),
    (["--block-size", "32"], {"block_size": 32}),
    (["--kv-cache-dtype", "auto"], {}),
    (["--kv-cache-dtype", "fp8"], {"kv_cache_dtype": "fp8"}),
    (["--kv_cache_dtype=fp8_e5m2"], {"kv_cache_dtype": "fp8_e5m2"}),
    (["--tensor-parallel-size", "4"], {"num_shard": 4}),
    (["-tp", "4"], {"num_shard": 4}),
    (["-tp=4"], {"num_shard": 4}),
    (["--quantization", "awq"], {"quantize": "awq"}),
    (["-q", "gptq_marlin"], {"quantize": "gptq"}),
    (["-q", "awq_marlin"], {"quantize": "awq"}),
    (["-q", "gguf"], {}),
    (["--model-impl", "transformers"], {"deployment_framework": "hf_transformers"}),
    (["--model-impl", "vllm"], {"deployment_framework": "tgis_native"}),
    (["--model-impl", "auto"], {}),
    (["--enforce-eager"], {"cuda_graphs": "0"}),
    (["--no-enforce-eager"], {}),
    (["--cudagraph-capture-sizes", "1", "2", "4"], {"cuda_graphs": "1,2,4"}),
    (["--lora-modules", "a=/a", *TWO], {"lora_adapters": "a=/a,b=/b,c=/c"}),
    (["--lora-modules", f"[{TWO[0]}]", "--seed", "1"], {"lora_adapters": "b=/b"}),
    (["--lora-modules=a=/a"], {"lora_adapters": "a=/a"}),
    (["--speculative-config", NGRAM], {"speculate": 5}),
    (["-sc", NGRAM], {"speculate": 5}),
    (["-sc", HEADS], {"speculate": 5, "speculator": "org/heads"}),
    (["-sc", HEADS, "--speculator", "org/heads"], {"speculate": 5, "speculator": "org/heads"}),
    (["-sc", ALL_HEADS], {"speculator": "org/heads"}),
    (["-sc", EAGLE], {"speculate": 5, "speculator": "org/heads"}),
    (["-sc", MTP], {"speculate": 1, "speculator": "mtp"}),
    (["--speculative-model", "org/heads"], {"speculator": "org/heads"}),
    (["--speculative-model", "[ngram]", "--num-speculative-tokens", "3"], {"speculate": 3}),
    (["--otlp-traces-endpoint", "http://c:4317"], {"otlp_endpoint": "http://c:4317"}),
    (["--allowed-origins", '["https://a", "https://b"]'], {"cors_allow_origin": "https://a,https://b"}),
    (["--ssl-certfile", "/c", "--ssl-keyfile", "/k"], TLS),
    (["--chat-template", "/t"], {"chat_template": "/t"}),
    (["--tool-call-parser", "hermes"], {"tool_call_parser": "hermes"}),
    (["--reasoning-parser", "deepseek_r1"], {"reasoning_parser": "deepseek_r1"}),
    (["--nnodes", "1", "--node-rank", "0"], {}),
    (["--generation-config", "auto"], {}),
    (["--generation-config", "vllm"], {"generation_config": "none"}),
    (["--generation_config=vllm"], {"generation_config": "none"}),
    (["--generation-config", "/g"], {"generation_config": "/g"}),
    (["--override-generation-config", '{"top_k": 5}'], {"override_generation_config": '{"top_k": 5}'}),
    (["--http-api-port", "8001"], {"http_api_port": 8001}),
    (["-g", "90"], {"grpc_port": 90}),
]
VARIABLES: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({"VLLM_API_KEY": "a-key"}, {"auth_tokens": Secret("a-key")}),
    ({"VLLM_LOGGING_LEVEL": "DEBUG"}, {"log_level": "debug"}),
    ({"VLLM_LOGGING_LEVEL": "CRITICAL"}, {"log_level": "error"}),
    ({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}, {"runtime_adapters": True}),
    ({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}, {"runtime_adapters": True}),
    ({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0"}, {}),
    ({"VLLM_LORA_RESOLVER_CACHE_DIR": "/a"}, {"adapter_cache": "/a"}),
    # A Kubernetes Service with the name vllm sets these in its namespace.
    ({"VLLM_PORT": "tcp://10.0.0.1:8000", "VLLM_SERVICE_HOST": "10.0.0.1"}, {}),
    ({"MAX_NUM_SEQS": "8", "TENSOR_PARALLEL_SIZE": "2"}, {}),
    ({"PORT": "7", "NUM_SHARD": "2", "HTTP_API": "openai"}, {"port": 7, "num_shard": 2}),
]
WITHOUT_EFFECT = """
enable-auto-tool-choice enable-prefix-caching no-enable-prefix-caching enable-chunked-prefill async-scheduling
disable-log-requests enable-log-requests disable-log-stats enable-lora fully-sharded-loras
disable-custom-all-reduce enable-expert-parallel disable-sliding-window disable-uvicorn-access-log
enable-prompt-tokens-details enable-request-id-headers disable-fastapi-docs enable-ssl-refresh
allow-credentials use-tqdm-on-load disable-async-output-proc use-v2-block-manager disable-cascade-attn
prefix-caching-hash-algo=sha256 swap-space=4 preemption-mode=swap max-log-len=100 uvicorn-log-level=warning
max-loras=4 max-cpu-loras=8 max-lora-rank=64 lora-dtype=auto guided-decoding-backend=xgrammar
structured-outputs-config={} compilation-config=3 max-seq-len-to-capture=8192 attention-backend=FLASHINFER
distributed-executor-backend=ray seed=7 limit-mm-per-prompt={"image":1} max-logprobs=20
max-logprobs=5 load-format=auto load-format=safetensors load-format=gguf
pipeline-parallel-size=1 data-parallel-size=1 task=generate runner=generate
cpu-offload-gb=0 response-role=assistant tokenizer-mode=auto
allowed-methods=["*"] allowed-headers=["*"] num-scheduler-steps=8 max-num-partial-prefills=2
collect-detailed-traces=all stream-interval=2 ignore-patterns=* chat-template-content-format=auto
mm-processor-kwargs={} long-prefill-token-threshold=4 max-parallel-loading-workers=2
""".split()
REFUSED = """
rope-theta=1 hf-overrides={} tokenizer-revision=1
skip-tokenizer-init kv-cache-memory-bytes=1 config=/c.yaml tool-parser-plugin=/p.py
reasoning-parser-plugin=/p.py tool-server=demo exclude-tools-when-tool-choice-none
trust-request-chat-template default-chat-template-kwargs={} return-tokens-as-token-ids
enable-force-include-usage enable-prompt-embeds
enable-tokenizer-info-endpoint ssl-ca-certs=/c ssl-ciphers=x root-path=/x uds=/x log-config-file=/x
middleware=x logits-processors=x worker-cls=x worker-extension-cls=x scheduler-cls=x
model-loader-extra-config={} additional-config={} kv-transfer-config={} kv-events-config={}
data-parallel-rank=0 data-parallel-address=x data-parallel-hybrid-lb enable-sleep-mode enable-eplb
default-mm-loras={} enable-lora-bias enable-prompt-adapter qlora-adapter-name-or-path=x
max-logprobs=21 max-logprobs=-1 load-format=dummy
scheduling-policy=other pipeline-parallel-size=2 data-parallel-size=2 task=embed
runner=pooling cpu-offload-gb=10 response-role=bot tokenizer-mode=mistral
ssl-cert-reqs=2 config-format=mistral
""".split()


def changes(arguments: list[str], env: dict[str, str] | None = None) -> dict[str, Any]:
    """Return the differences from the configuration without arguments."""
    has_model = not {"--model", "org/model"}.isdisjoint(arguments)
    config, result = run(LauncherConfig, [*arguments, *(COMPAT if has_model else COMPLETE)], env, "launcher")
    assert result.exit_code == 0, result.output
    values = {f.name: (getattr(config, f.name), f.default) for f in fields(LauncherConfig)}
    return {name: value for name, (value, default) in values.items() if value != default}


@pytest.fixture(scope="module")
def plain() -> LauncherConfig:
    config: LauncherConfig = run(LauncherConfig, COMPLETE, reads="launcher")[0]
    return config


@pytest.mark.parametrize(("arguments", "expected"), MEANINGS, ids=lambda one: " ".join(one)[:40])
def test_meanings(arguments: list[str], expected: dict[str, Any]) -> None:
    assert changes(arguments) == PLAIN | expected


@pytest.mark.parametrize(("env", "expected"), VARIABLES, ids=lambda one: " ".join(one)[:40])
def test_variables(env: dict[str, str], expected: dict[str, Any]) -> None:
    assert changes([], env) == PLAIN | expected


@pytest.mark.parametrize("flag", WITHOUT_EFFECT)
def test_options_without_effect_get_one_warning(flag: str, plain: LauncherConfig) -> None:
    config, result = run(LauncherConfig, [*COMPLETE, f"--{flag}"], reads="launcher")
    assert result.exit_code == 0, result.output
    assert config == plain
    lines = [line for line in result.stderr.splitlines() if " WARNING " in line]
    assert len(lines) == 1
    assert f"--{flag.partition('=')[0]} has no effect: " in lines[0]


@pytest.mark.parametrize("flag", REFUSED)
def test_refused_options_are_named(flag: str) -> None:
    assert refusal([*COMPAT, f"--{flag}"]).startswith(f"--{flag.partition('=')[0]}: ")


def test_without_compat_a_flag_is_a_usage_error_with_a_hint() -> None:
    for flag in ("--max-model-len=5", "--enable-lora", "-tp=2", "--model=/m"):
        text = refusal([flag], code=2)
        assert "it is vLLM's: add --compat vllm" in text
        assert refusal(["--compat", "tgi", flag], code=2) == text
    assert "it is TGI's: add --compat tgi" in refusal([*COMPAT, "--max-total-tokens", "5"], code=2)
    for compat, http_api in ([], None), (["--compat", "tgi", "--model-id", "m"], "tgi"):
        config, _ = run(LauncherConfig, compat, {"VLLM_LOGGING_LEVEL": "DEBUG"}, "launcher")
        assert (config.log_level, config.port, config.http_api) == ("info", 3000, http_api)


def test_values_that_cannot_be_used() -> None:
    for arguments, code, text in (
        (["--lora-modules", "a"], 1, "NAME=DIRECTORY or a JSON object"),
        (["--lora-modules", '{"name": "a"}'], 1, "must have a name and a path"),
        (["--lora-modules", "{"], 1, "it is not JSON"),
        (["--allowed-origins", "*"], 1, "it is not JSON"),
        (["--allowed-origins", '"*"'], 1, "not a JSON list"),
        (["--speculative-config", SUFFIX], 1, "only ngram, mtp, and with a model mlp_speculator"),
        (["--speculative-config", '{"method": "medusa"}'], 1, "only ngram"),
        (["--speculative-config", '{"method": "ngram"}'], 1, "num_speculative_tokens is not a number"),
        (["--speculative-config", "[]"], 1, "it is not a JSON object"),
        (["-sc", HEADS, "--speculator", "org/others"], 1, "different values (org/others and org/heads)"),
        (["--speculative-config", "[" * 99999], 1, "it is not JSON"),
        (["--model-impl", "terratorch"], 1, "not one of auto, vllm, transformers"),
        (["--max-model-len", "1.5"], 1, "not a whole number"),
        (["--max-model-len", "many"], 2, "--max-model-len"),
        (["--max-model-len", "1"], 1, "at least 2"),
        (["--max-model-len", "1e30"], 2, "'1e30' is not a valid integer"),
        (["--max-model-len", f"{10**30 + 1}"], 2, f"{10**30 + 1} is more than 2147483647."),
        (["--max-model-len", f"{10**15 + 1}T"], 2, f"{(10**15 + 1) * 1024**4} is more than 2147483647."),
        (["--max-model-len", "9" * 5000], 2, "is not a valid integer."),
        (["--max-logprobs", "9" * 5000], 1, "the maximum is 20"),
        (["--lora-modules", '{"name": "a", "path": "/a\\u0000"}'], 1, "without commas and U+0000"),
        (["--quantization", "exl2"], 2, "--quantize int8"),
        (["--num-gpu-blocks-override", "x"], 1, "cannot be used"),
        (["--dtype", "int8"], 2, "--dtype"),
        (["--tensor-parallel-size", "2", "--num-shard", "3"], 1, "different values (3 and 2)"),
        (["--seed", "1", "model"], 2, "unexpected extra argument (model)"),
        (["--no-such-flag"], 2, "--no-such-flag"),
        (["--rope-scaling", '{"rope_type": "yarn"}'], 2, "--rope-scaling"),
        ([], 2, "Missing option '--model': --compat vllm has no default model"),
    ):
        assert text in refusal([*arguments, *COMPAT], code=code), arguments


def test_a_key_is_not_shown() -> None:
    given = ["--api-key", "s3cret", "other", "--env", "-e", "--hf-token", "s3cret"]
    config, result = run(LauncherConfig, [*COMPLETE, *given], {"VLLM_API_KEY": "s3cret\nother"}, "launcher")
    assert config.auth_tokens == Secret("s3cret\nother")
    assert "auth_tokens: (hidden) (--api-key)" in result.stderr
    assert "s3cret" not in result.output + repr(config)
    text = refusal([*COMPAT, "--api-key", "s3cret"], {"VLLM_API_KEY": "0ther"})
    assert text == "--api-key and VLLM_API_KEY are given with different values ((hidden) and (hidden))"
    text = refusal([*COMPLETE, "--auth-tokens-path", "/t"], {"VLLM_API_KEY": "s3cret"})
    assert text.startswith("auth_tokens: ")
    assert "s3cret" not in text
    for arguments, env in ((["--api-key", ""], {}), ([], {"VLLM_API_KEY": ""})):
        assert run(LauncherConfig, [*COMPLETE, *arguments], env, "launcher")[0].auth_tokens is None
    assert run(LauncherConfig, [], {"AUTH_TOKENS": "a"}, "launcher")[0].auth_tokens == Secret("a")


def test_the_environment_may_ask_for_the_names() -> None:
    config, result = run(
        LauncherConfig, ["org/model", "-tp", "2"], {"COMPAT": "vllm", "VLLM_USE_V1": "1"}, "launcher"
    )
    assert (config.model_name, config.num_shard, config.port) == ("org/model", 2, 8000), result.output
    assert "VLLM_USE_V1 has no effect" in result.stderr
