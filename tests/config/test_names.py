"""Every name that TGIS reads is an option, an alias of one, or a name without effect, with the reason. The
names are copied from its manual, not from our declarations."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_line import REQUIRED, parse, refusal, run
from tgis.config.cuda_graphs import parse_graph_sizes
from tgis.config.processes import LauncherConfig, RouterConfig, ShardConfig

LAUNCHER_FLAGS = """
model-name revision deployment-framework dtype dtype-str quantize num-shard max-concurrent-requests
max-sequence-length max-new-tokens max-batch-size max-prefill-padding batch-safety-margin
max-waiting-tokens port grpc-port shard-uds-path master-addr master-port json-output tls-cert-path
tls-key-path tls-client-ca-cert-path output-special-tokens cuda-process-memory-fraction
default-include-stop-seqs otlp-endpoint otlp-service-name
""".split()
ROUTER_FLAGS = """
max-concurrent-requests max-sequence-length max-new-tokens max-batch-size max-prefill-padding
max-waiting-tokens port grpc-port master-shard-uds-path tokenizer-path tokenization-workers json-output
tls-cert-path tls-key-path tls-client-ca-cert-path output-special-tokens default-include-stop-seqs
otlp-endpoint otlp-service-name
""".split()
SERVE_FLAGS = """
dtype quantize max-sequence-length max-new-tokens max-batch-size batch-safety-margin revision
cuda-process-memory-fraction uds-path sharded
""".split()
LAUNCHER_VARIABLES = """
NUM_GPUS CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES HF_HUB_CACHE TRANSFORMERS_CACHE
HUGGINGFACE_HUB_CACHE HF_HOME HOME PYTORCH_CUDA_ALLOC_CONF MAX_BATCH_WEIGHT MAX_PREFILL_WEIGHT LOG_LEVEL
""".split()
SHARD_VARIABLES = """
FLASH_ATTENTION PAGED_ATTENTION PT2_COMPILE TRUST_REMOTE_CODE CUDA_PAD_TO_MULT_OF_8
COMPACT_BEFORE_PREFILL PREFIX_STORE_PATH PROMPT_CACHE_SIZE_MB MAX_PROMPT_PREFIX_LENGTH ESTIMATE_MEMORY
ESTIMATE_MEMORY_BATCH_SIZE ESTIMATE_MEMORY_MIN_SAMPLES ESTIMATE_MEMORY_START_SEQ_LEN
ESTIMATE_MEMORY_STOP_SEQ_LEN ESTIMATE_MEMORY_FIT_THRESHOLD ESTIMATE_MEMORY_NEW_TOKENS
ESTIMATE_MEMORY_NEW_TOKEN_SAMPLES LOG_GPU_USAGE_INTERVAL FP32_LOGITS_PROCESS BLOOM_SLOW_BUT_EXACT
TRANSFORMERS_ATTN_IMPL DISABLE_EXLLAMA EXLLAMA_VERSION GPTQ_CUDA_TYPE DISABLE_CUSTOM_KERNELS
MERGE_ONNX_GRAPHS OPTIMIZE_ONNX_MODEL SPECULATOR_NAME SPECULATOR_REVISION SPECULATOR_N_CANDIDATES
SPECULATOR_TOP_K_TOKENS_PER_HEAD SPECULATOR_MAX_BATCH_SIZE KV_CACHE_MANAGER_NUM_GPU_BLOCKS RANK
WORLD_SIZE DEBUG
""".split()
FLAG = re.compile(r"--[a-z][a-z-]+")
SHORT = ["-p", "-g", "-c"]
ROOT = Path(__file__).resolve().parents[2]
HAS_OWN_EFFECT = {
    *("KV_CACHE_MANAGER_NUM_GPU_BLOCKS", "RANK", "WORLD_SIZE", "ESTIMATE_MEMORY"),
    "SPECULATOR_NAME",
    *("TRUST_REMOTE_CODE", "PREFIX_STORE_PATH", "PROMPT_CACHE_SIZE_MB", "MAX_PROMPT_PREFIX_LENGTH"),
}


def variable_of(flag: str) -> str:
    return "OTEL_SERVICE_NAME" if flag == "otlp-service-name" else flag.upper().replace("-", "_")


def help_of(command: str) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "tgis", command, "--help"], capture_output=True, text=True, check=True
    )
    return result.stdout


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    return {command: help_of(command) for command in ("launcher", "router", "serve")}


@pytest.fixture(scope="module")
def document() -> str:
    return (ROOT / "docs" / "configuration.md").read_text()


def test_flags_of_the_original(helps: dict[str, str]) -> None:
    for command, names in (("launcher", LAUNCHER_FLAGS), ("router", ROUTER_FLAGS), ("serve", SERVE_FLAGS)):
        flags = re.findall(r"--([a-z0-9-]+)", helps[command])
        assert set(names) <= set(flags), set(names) - set(flags)
    for short in SHORT:
        assert f"{short}, --" in helps["launcher"]
    assert "MODEL_NAME] [DEPLOYMENT_FRAMEWORK]" in " ".join(helps["serve"].split())


def test_variables_of_the_original(document: str) -> None:
    variables = [*map(variable_of, (*LAUNCHER_FLAGS, *ROUTER_FLAGS)), *LAUNCHER_VARIABLES, *SHARD_VARIABLES]
    missing = {name for name in variables if f"`{name}`" not in document}
    assert not missing


@pytest.mark.parametrize("variable", [name for name in SHARD_VARIABLES if name not in HAS_OWN_EFFECT])
def test_a_variable_without_effect_is_one_line_of_warning(variable: str) -> None:
    for config_type, reads in ((LauncherConfig, "launcher"), (ShardConfig, "serve")):
        _, result = run(config_type, REQUIRED[config_type], {variable: "5"}, reads)
        assert result.exit_code == 0, result.output
        lines = [line for line in result.stderr.splitlines() if " WARNING " in line]
        assert len(lines) == 1
        assert f"{variable} has no effect: " in lines[0]


def test_unset_options_cause_no_warning() -> None:
    for config_type, reads in (
        (LauncherConfig, "launcher"),
        (RouterConfig, "router"),
        (ShardConfig, "serve"),
    ):
        assert "WARNING" not in run(config_type, REQUIRED[config_type], {}, reads)[1].stderr


@pytest.mark.parametrize("flag", ["--max-waiting-tokens", "--batch-safety-margin"])
def test_a_flag_without_effect_is_one_line_of_warning(flag: str) -> None:
    variable = flag[2:].upper().replace("-", "_")
    _, result = run(LauncherConfig, [flag, "1"], {variable: "7"}, "launcher")
    assert result.stderr.count("WARNING") == 1
    assert f"{flag} has no effect: " in result.stderr


def test_names_that_mean_ours() -> None:
    blocks = {"KV_CACHE_MANAGER_NUM_GPU_BLOCKS": "10"}
    assert run(LauncherConfig, [], blocks, "launcher")[0].kv_cache_tokens == 160
    text = (
        "--kv-cache-tokens and KV_CACHE_MANAGER_NUM_GPU_BLOCKS are given with different values (99 and 160)"
    )
    assert refusal(["--kv-cache-tokens", "99"], blocks) == text
    assert run(LauncherConfig, ["--kv-cache-tokens", "160"], blocks, "launcher")[0].kv_cache_tokens == 160
    assert "'many' cannot be used" in refusal([], {"KV_CACHE_MANAGER_NUM_GPU_BLOCKS": "many"})
    for config_type, reads in ((LauncherConfig, "launcher"), (ShardConfig, "serve")):
        for given in (["-c", "0.5"], ["--cuda-process-memory-fraction", "0.5"]):
            config, result = run(config_type, [*REQUIRED[config_type], *given], {}, reads)
            assert config.cuda_memory_fraction == 0.5
            assert "WARNING" not in result.stderr
    router = [*REQUIRED[RouterConfig], "--master-shard-uds-path", "/run/s-0"]
    assert run(RouterConfig, router, {}, "router")[0].shard_uds_path == "/run/s"
    assert parse(ShardConfig, REQUIRED[ShardConfig], {"RANK": "1", "WORLD_SIZE": "2"}).rank == 1


def test_old_manifests_start() -> None:
    """All names that the deployments of the original set, together."""
    env = {
        "MODEL_NAME": "google/flan-t5-xxl",
        "DTYPE_STR": "float16",
        "MAX_SEQUENCE_LENGTH": "2048",
        "MAX_BATCH_SIZE": "12",
        "MAX_CONCURRENT_REQUESTS": "64",
        "MAX_BATCH_WEIGHT": "",
        "MAX_PREFILL_WEIGHT": "1000000",
        "TRANSFORMERS_CACHE": "/shared_model_storage/transformers_cache",
        "NUM_GPUS": "2",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "DEPLOYMENT_FRAMEWORK": "tgis_native",
        "FLASH_ATTENTION": "true",
        "PT2_COMPILE": "true",
        "TLS_CERT_PATH": "",
        "TLS_KEY_PATH": "",
    }
    flags = ["--model-name=/mnt/models/", "--port=3000", "--grpc-port=8033", "--master-port", "29502"]
    config, result = run(LauncherConfig, flags, env, "launcher")
    assert (config.model_name, config.dtype_str, config.num_gpus) == ("/mnt/models/", "float16", 2)
    assert (config.max_batch_size, config.max_concurrent_requests, config.tls_cert_path) == (12, 64, None)
    warned = re.findall(r"WARNING \S+ (\S+) has no effect", result.stderr)
    assert sorted(warned) == ["FLASH_ATTENTION", "MAX_PREFILL_WEIGHT", "PT2_COMPILE"]


def test_the_document_has_the_flags_of_the_commands(helps: dict[str, str], document: str) -> None:
    """TGI's names are in a separate table, and hidden from the help."""
    sections = dict(re.findall(r"\n## `([a-z -]+)`\n(.*?)(?=\n## )", document, re.DOTALL))
    tgis, _, _ = document.partition("\n## Names of Hugging Face TGI")
    foreign = re.findall(r"\n\| `(--[a-z-]+)`.*?\| ([a-z, ]+) \| (?:means|no effect|refused)", tgis)
    programs = ("text-generation-launcher", "text-generation-router", "text-generation-server serve")
    for program, (command, text) in zip(programs, helps.items(), strict=True):
        listed = {
            flag for row in sections[program].splitlines() for flag in FLAG.findall(row.split(" | ")[0])
        }
        listed |= {flag for flag, commands in foreign if command in commands.split(", ")}
        shown = {
            flag
            for row in text.splitlines()
            if row.startswith("  -")
            for flag in FLAG.findall(row[2:].split("  ")[0])
        }
        assert listed == shown - {"--help", "--version"}


def test_sizes_of_graphs() -> None:
    for given, sizes in (([], None), (["0"], ()), (["8,1, 2,2"], (1, 2, 8)), (["16"], (16,))):
        config, _ = run(LauncherConfig, ["--cuda-graphs", *given] if given else [], {}, "launcher")
        assert parse_graph_sizes(config.cuda_graphs) == sizes
    for text in ("all", "1,,2", "-1", "1.5", "²"):
        error = refusal([f"--cuda-graphs={text}"])
        assert error == f"--cuda-graphs: {text!r} is neither 0 nor a list of numbers of rows, such as 1,2,4,8"
    assert "CUDA_GRAPHS: 'all'" in refusal([], {"CUDA_GRAPHS": "all"})
