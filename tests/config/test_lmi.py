"""LMI's option names under --compat lmi. The names and defaults are copied from its manual, not from our
table."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.support.command_line import BLANK, refusal, run
from tgis.cli.process_command import process_command
from tgis.config.option import Secret
from tgis.config.processes import LauncherConfig
from tgis.router.api.lmi.options import outcomes

COMPAT = ["--compat", "lmi"]
ENV = {"CUDA_VISIBLE_DEVICES": "-1"}
PLAIN = {
    "compat": "lmi",
    "cuda_visible_devices": "-1",
    "model_name": "/m",
    "http_api": "lmi",
    "port": 8080,
    "max_concurrent_requests": 1000 + 256,
    "max_message_bytes": 64 * 1024 * 1024,
    "num_shard": 1,
    "startup_timeout": 1200.0,
    "first_token_timeout": 240.0,
    "next_token_timeout": 120.0,
}
MEANINGS: dict[str, dict[str, Any]] = {
    "option.model_id=org/model": {"model_name": "org/model"},
    "option.model_dir=/d": {"model_name": "/d"},
    "option.dtype=fp16": {"dtype": "float16"},
    "option.dtype=bf16": {"dtype": "bfloat16"},
    "option.dtype=fp32": {"dtype": "float32"},
    "option.dtype=float16": {"dtype": "float16"},
    "option.dtype=auto": {},
    "option.tensor_parallel_degree=4": {"num_shard": 4},
    "option.tensor_parallel_degree=max": {"num_shard": 1},
    "option.tensor_parallel_degree=-1": {"num_shard": 1},
    "option.max_rolling_batch_size=32": {"max_batch_size": 32, "max_concurrent_requests": 1032},
    "option.trust_remote_code=true": {"trust_remote_code": True},
    "option.trust_remote_code=True": {"trust_remote_code": True},
    "option.trust_remote_code=FALSE": {},
    "option.revision=v1": {"revision": "v1"},
    "option.model_loading_timeout=1800": {"startup_timeout": 1800.0},
    "model_loading_timeout=1800": {"startup_timeout": 1800.0},
    "job_queue_size=10": {"max_concurrent_requests": 266},
    "option.output_formatter=json": {"lmi_output_formatter": "json"},
    "option.output_formatter=jsonlines": {"lmi_output_formatter": "jsonlines"},
    "option.output_formatter=sse": {"lmi_output_formatter": "sse"},
    "option.output_formatter=tgi_compat": {"lmi_output_formatter": "tgi_compat"},
    "option.max_tokens=1024": {"max_sequence_length": 1024},
    "option.enable_cuda_graph=false": {"cuda_graphs": "0"},
    "option.enable_cuda_graph=true": {},
    "option.quantize=bitsandbytes4": {"quantize": "bitsandbytes-nf4"},
    "option.quantize=bitsandbytes8": {"quantize": "bitsandbytes"},
    "option.quantize=gptq": {"quantize": "gptq"},
    "option.quantize=awq": {"quantize": "awq"},
    "option.quantize=fp8": {"quantize": "fp8"},
    "option.load_in_4bit=true": {"quantize": "bitsandbytes-nf4"},
    "option.load_in_8bit=true": {"quantize": "bitsandbytes"},
    "option.load_in_8bit=false": {},
    "option.max_rolling_batch_prefill_tokens=1088": {"max_step_tokens": 1088},
    "option.max_model_len=4096": {"max_sequence_length": 4096},
    "option.gpu_memory_utilization=0.85": {"cuda_memory_fraction": 0.85},
    "option.enforce_eager=true": {"cuda_graphs": "0"},
    "option.enforce_eager=False": {},
    'option.speculative_config={"method": "ngram", "num_speculative_tokens": 3}': {"speculate": 3},
    'option.speculative_config={"model": "org/heads"}': {"speculator": "org/heads"},
    "option.tool_call_parser=hermes": {"tool_call_parser": "hermes"},
    "option.chat_template=/t": {"chat_template": "/t"},
    "option.n_positions=2048": {"max_sequence_length": 2048},
    "option.max_input_len=100": {"max_input_tokens": 100},
    "option.max_output_len=50": {"max_new_tokens": 50},
    "option.kv_cache_dtype=auto": {},
    "option.kv_cache_dtype=fp8": {"kv_cache_dtype": "fp8"},
    "option.kv_cache_dtype=fp8_e5m2": {"kv_cache_dtype": "fp8_e5m2"},
    "option.kv_cache_dtype=int8": {"kv_cache_dtype": "int8"},
    "option.tokens_per_block=64": {"block_size": 64},
    "option.batch_scheduler_policy=guaranteed_no_evict": {"reserve_output": True},
    "option.batch_scheduler_policy=max_utilization": {},
    "option.kv_cache_free_gpu_mem_fraction=0.95": {"kv_cache_memory_fraction": 0.95},
    "option.max_num_sequences=8": {"max_batch_size": 8, "max_concurrent_requests": 1008},
    "option.max_num_seqs=8": {"max_batch_size": 8, "max_concurrent_requests": 1008},
    "option.max_num_batched_tokens=64": {"max_step_tokens": 64},
    "predict_timeout=60": {"first_token_timeout": 60.0},
    "option.predict_timeout=60": {"first_token_timeout": 60.0},
    "chunked_read_timeout=30": {"next_token_timeout": 30.0},
    "option.served_model_name=a": {"served_model_name": "a"},
    "option.generation_config=auto": {},
    "option.generation_config=vllm": {"generation_config": "none"},
    "option.generation_config=/g": {"generation_config": "/g"},
    'option.override_generation_config={"top_k": 5}': {"override_generation_config": '{"top_k": 5}'},
    "option.reasoning_parser=deepseek_r1": {"reasoning_parser": "deepseek_r1"},
}
WITHOUT_EFFECT = """
engine=Python engine=MPI option.rolling_batch=auto option.rolling_batch=vllm option.rolling_batch=lmi-dist
option.rolling_batch=scheduler option.rolling_batch=trtllm option.rolling_batch=disable
option.entryPoint=djl_python.huggingface option.parallel_loading=true option.enable_streaming=true
batch_size=4 max_batch_delay=100 max_idle_time=60 minWorkers=1 maxWorkers=2 gpu.minWorkers=1
load_on_devices=* retry_threshold=10
option.task=text-generation option.low_cpu_mem_usage=true option.triangular_masking=true
option.return_tuple=true option.training_mp_size=1 option.smoothquant_alpha=0.8 option.device_map=auto
option.decoding_strategy=sample option.decoding_strategy=greedy option.max_sparsity=0.1 option.max_splits=2
option.disable_flash_attn=true option.paged_attention=false option.load_format=auto
option.load_format=safetensors option.load_format=gguf
option.enable_prefix_caching=true option.enable_prefix_caching=false
option.enable_chunked_prefill=true option.enable_lora=true option.max_loras=4
option.max_lora_rank=64 option.max_cpu_loras=8 option.tokenizer_mode=auto option.enable_auto_tool_choice=true
option.unroll=true option.neuron_optimize_level=2 option.context_length_estimate=128
option.load_split_model=true option.compiled_graph_path=/g option.use_custom_all_reduce=true
option.enable_trt_overlap=true option.baichuan_model_version=v2_13b option.swap_space=4
option.pipeline_parallel_degree=1 throttle_error_http_code=429
""".split()
REFUSED = """
engine=DeepSpeed option.model_id=s3://bucket/model option.dtype=int8 option.dtype=fp9
option.rolling_batch=deepspeed option.entryPoint=model.py option.output_formatter=mine.format
option.quantize=dynamic_int8 option.quantize=smoothquant option.quantize=exl2 option.task=text-embedding
option.checkpoint=c.json option.device_map=balanced option.decoding_strategy=contrastive
option.load_format=tensorizer option.kv_cache_dtype=int4 option.smoothquant_per_token=true
option.smoothquant_per_channel=true option.multi_query_mode=true option.batch_scheduler_policy=none
option.tokenizer_mode=mistral option.rope_scaling={} option.pipeline_parallel_degree=2
option.speculative_config={"model":5} option.tensor_parallel_degree=all
option.tensor_parallel_degree=0
option.max_model_len=many option.trust_remote_code=yes option.enforce_eager=1 job_queue_size=-1
job_queue_size=many option.model_loading_timeout=soon predict_timeout=1m option.max_rolling_batch_size=0
option.load_in_4bit=1 option.gpu_memory_utilization=90
""".split()
MANY = 10**30
TOO_LARGE = [
    (f"job_queue_size={MANY}", f"{MANY + 256} is not in the range 1<=x<=100000."),
    ("job_queue_size=99999", "100255 is not in the range 1<=x<=100000."),
    (f"job_queue_size={'9' * 5000}", "it has more than 100 digits"),
    (f"option.max_rolling_batch_size={MANY}", f"{MANY} is not in the range 1<=x<=65536."),
    ("option.max_rolling_batch_size=65537", "65537 is not in the range 1<=x<=65536."),
    ("option.tensor_parallel_degree=1025", "1025 is not in the range 1<=x<=1024."),
    (f"option.max_model_len={MANY}", f"{MANY} is more than 2147483647."),
    (f"max_payload_in_mb={MANY}", f"{MANY << 20} is more than 2147483647."),
    ("predict_timeout=1e300", "1e300 is more than 2147483647."),
]


def given(
    tmp_path: Path, text: str = "", env: dict[str, str] | None = None, *arguments: str
) -> tuple[LauncherConfig, Result]:
    """Return the configuration from a serving.properties with this text, and the launcher's output."""
    config, result = run(
        LauncherConfig, [*COMPAT, *file_with(tmp_path, text), *arguments], {**ENV, **(env or {})}, "launcher"
    )
    assert result.exit_code == 0, result.output
    return config, result


def file_with(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "serving.properties").write_text(text)
    return ["--properties", str(tmp_path / "serving.properties")]


def changes(config: LauncherConfig) -> dict[str, Any]:
    values = {f.name: (getattr(config, f.name), f.default) for f in fields(LauncherConfig)}
    return {name: a for name, (a, default) in values.items() if a != default and name != "properties"}


@pytest.mark.parametrize("line", MEANINGS)
def test_meanings(line: str, tmp_path: Path) -> None:
    is_model = line.startswith("option.model")
    config, result = given(
        tmp_path, line, {} if is_model and "timeout" not in line else {"HF_MODEL_ID": "/m"}
    )
    assert changes(config) == PLAIN | MEANINGS[line]
    assert f"{line.partition('=')[0]}=" in result.stderr
    assert "WARNING" not in result.stderr


@pytest.mark.parametrize("line", WITHOUT_EFFECT)
def test_options_without_effect_get_one_warning(line: str, tmp_path: Path) -> None:
    config, result = given(tmp_path, line, {"HF_MODEL_ID": "/m"})
    assert changes(config) == PLAIN
    [warning] = [one for one in result.stderr.splitlines() if " WARNING " in one]
    assert f"{line} (serving.properties:1): no effect: " in warning


@pytest.mark.parametrize("line", REFUSED)
def test_refused_options_are_named_with_their_source(line: str, tmp_path: Path) -> None:
    text = refusal([*COMPAT, *file_with(tmp_path, f"# first\n{line}\n")], {**ENV, "HF_MODEL_ID": "/m"})
    assert text.startswith(f"{line.partition('=')[0]} in serving.properties:2: ")


@pytest.mark.parametrize(("line", "reason"), TOO_LARGE)
def test_numbers_that_are_too_large_name_place_and_limit(line: str, reason: str, tmp_path: Path) -> None:
    text = refusal([*COMPAT, *file_with(tmp_path, line)], {**ENV, "HF_MODEL_ID": "/m"})
    assert text.startswith(f"{line.partition('=')[0]} in serving.properties:1: ")
    assert text.endswith(f" cannot be used: {reason}")


def test_the_largest_degree_is_the_number_of_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "has_gpus", lambda visible: visible != "-1")
    monkeypatch.setattr(outcomes, "count_gpus", lambda: 8)
    env = {"HF_MODEL_ID": "/m"}
    for text in ("", "option.tensor_parallel_degree=max", "option.tensor_parallel_degree=-1"):
        assert given(tmp_path, text, env | {"CUDA_VISIBLE_DEVICES": "0,1"})[0].num_shard == 2
        assert given(tmp_path, text, env | {"CUDA_VISIBLE_DEVICES": " "})[0].num_shard == 8
        assert given(tmp_path, text, env)[0].num_shard == 1
        assert (
            given(tmp_path, text, {**env, "CUDA_VISIBLE_DEVICES": "0,1"}, "--device", "cpu")[0].num_shard == 1
        )
    assert given(tmp_path, "", env | {"CUDA_VISIBLE_DEVICES": "0,1", "NUM_GPUS": "1"})[0].num_shard is None


def test_the_order_of_sources(tmp_path: Path) -> None:
    """Each source overrides the next ones; it is removed after it was checked."""
    text = "option.model_id=/file\noption.max_rolling_batch_size=3\njob_queue_size=5"
    env = {
        "MODEL_NAME": "/own-variable",
        "OPTION_MODEL_ID": "/variable",
        "OPTION_MAX_ROLLING_BATCH_SIZE": "4",
        "SERVING_JOB_QUEUE_SIZE": "6",
        "HF_MODEL_ID": "/simple",
        "MAX_BATCH_SIZE": "7",
        "MAX_CONCURRENT_REQUESTS": "8",
    }
    flags = ["--model-name", "/flag", "--max-batch-size", "2", "--max-concurrent-requests", "99"]

    def read_sources(text: str, env: dict[str, str], *arguments: str) -> tuple[str, int, int]:
        config, _ = given(tmp_path, text, env, *arguments)
        return config.model_name, config.max_batch_size, config.max_concurrent_requests

    assert read_sources(text, env, *flags) == ("/flag", 2, 99)
    assert read_sources(text, env) == ("/own-variable", 3, 3 + 5)
    del env["MODEL_NAME"]
    assert read_sources(text, env) == ("/file", 3, 3 + 5)
    assert read_sources("", env) == ("/variable", 4, 4 + 6)
    simple = {name: env[name] for name in ("HF_MODEL_ID", "MAX_BATCH_SIZE", "MAX_CONCURRENT_REQUESTS")}
    assert read_sources("", simple) == ("/simple", 7, 7 + 8)
    assert read_sources("", {"HF_MODEL_ID": "/m"}) == ("/m", 256, 256 + 1000)


def test_simple_names(tmp_path: Path) -> None:
    env = {
        "HF_MODEL_ID": "/m",
        "HF_REVISION": "v1",
        "HF_TASK": "text-generation",
        "HF_MODEL_TRUST_REMOTE_CODE": "True",
        "HF_MODEL_QUANTIZE": "gptq",
        "TENSOR_PARALLEL_DEGREE": "2",
        "SM_NUM_GPUS": "4",
        "MAX_BATCH_PREFILL_TOKENS": "512",
        "CUDA_MEMORY_FRACTION": "0.5",
        "ENABLE_CUDA_GRAPHS": "false",
        "SAGEMAKER_STARTUP_TIMEOUT": "600",
        "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "50",
        "SAGEMAKER_MAX_PAYLOAD_IN_MB": "8",
        "SAGEMAKER_NUM_MODEL_WORKERS": "1",
        "HF_TOKEN": "hf_s3cret",
    }
    config, result = given(tmp_path, "", env)
    assert changes(config) == PLAIN | {
        "revision": "v1",
        "trust_remote_code": True,
        "quantize": "gptq",
        "num_shard": 2,
        "max_step_tokens": 512,
        "cuda_memory_fraction": 0.5,
        "cuda_graphs": "0",
        "startup_timeout": 600.0,
        "first_token_timeout": 50.0,
        "max_message_bytes": 8 * 1024 * 1024,
        "hf_token": Secret("hf_s3cret"),
    }
    assert "SM_NUM_GPUS=4 (environment): overridden by TENSOR_PARALLEL_DEGREE" in result.stderr
    bytes_ = given(tmp_path, "", {"HF_MODEL_ID": "/m", "SAGEMAKER_MAX_REQUEST_SIZE": "5"})[
        0
    ].max_message_bytes
    assert bytes_ == 5
    assert given(tmp_path, "", {"HF_MODEL_ID": "/m", "SM_NUM_GPUS": "4"})[0].num_shard == 4


def test_variables(tmp_path: Path) -> None:
    env = {
        "OPTION_ENTRYPOINT": "djl_python.huggingface",
        "OPTION_ENGINE": "Python",
        "OPTION_MODEL_ID": "/m",
        "OPTION_REVISION": " ",
        "SERVING_MIN_WORKERS": "1",
        "ARGS_WIDTH": "3",
        "SERVING_SERVICE_HOST": "10.0.0.1",
        "SERVING_PORT": "tcp://10.0.0.1:80",
        "SERVING_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    config, result = given(tmp_path, "", env)
    assert changes(config) == PLAIN
    for name in ("OPTION_ENTRYPOINT", "OPTION_ENGINE", "SERVING_MIN_WORKERS"):
        assert f"{name}={env[name]} (environment): no effect: " in result.stderr
    assert "ARGS_WIDTH=(hidden) (environment): no effect: " in result.stderr
    assert result.stderr.count("WARNING") == 4
    assert "OPTION_ENGINE: " in refusal(COMPAT, {**ENV, **env, "OPTION_ENGINE": "DeepSpeed"})


def test_names_of_one_file_must_agree(tmp_path: Path) -> None:
    text = "option.max_model_len=8\noption.n_positions=9"
    message = refusal([*COMPAT, *file_with(tmp_path, text)], {**ENV, "HF_MODEL_ID": "/m"})
    assert message.startswith("option.n_positions in serving.properties:2: ")
    assert "option.max_model_len in serving.properties:1 sets 8" in message
    text = "option.load_in_8bit=true\noption.quantize=bitsandbytes8"
    assert given(tmp_path, text, {"HF_MODEL_ID": "/m"})[0].quantize == "bitsandbytes"


def test_unknown_names(tmp_path: Path) -> None:
    for line, advice in (
        ("option.max_model_length=5", "did you mean option.max_model_len?"),
        ("max_model_len=5", "LMI reads it as option.max_model_len only"),
        ("option.max_batch_delay=5", "LMI reads it as max_batch_delay only"),
        ("option.max_idle_time=5", "LMI reads it as max_idle_time only"),
        ("option.job_queue_size=5", "LMI reads it as job_queue_size only"),
        ("option.allowed_origins=*", "no such option"),
        ("zzz=5", "no such option"),
    ):
        config, result = given(tmp_path, line, {"HF_MODEL_ID": "/m"})
        assert changes(config) == PLAIN
        [warning] = [one for one in result.stderr.splitlines() if " WARNING " in one]
        assert f"{line.partition('=')[0]}=(hidden) (serving.properties:1): unknown: " in warning
        assert advice in warning
        arguments = [*COMPAT, *file_with(tmp_path, line), "--strict-config"]
        assert advice in refusal(arguments, {**ENV, "HF_MODEL_ID": "/m"})


def test_files_are_found(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.max_model_len=77\n")
    (tmp_path / "config.json").write_text("{}")
    env = {**ENV, "OPTION_MODEL_DIR": str(tmp_path)}
    config, _ = run(LauncherConfig, COMPAT, env, "launcher")
    assert (config.model_name, config.max_sequence_length) == (str(tmp_path), 77)
    config, _ = run(LauncherConfig, COMPAT, {**env, "HF_MODEL_ID": "/m"}, "launcher")
    assert (config.model_name, config.max_sequence_length) == ("/m", 77)
    file = ["--properties", str(tmp_path / "serving.properties")]
    assert run(LauncherConfig, [*COMPAT, *file], ENV, "launcher")[0].model_name == str(tmp_path)


def test_missing_or_broken_properties_files(tmp_path: Path) -> None:
    assert "--compat lmi has no default model" in refusal(COMPAT, ENV, code=2)
    text = refusal([*COMPAT, "--properties", str(tmp_path / "none")], ENV)
    assert text == f"{tmp_path}/none: the properties file cannot be read: No such file or directory"
    text = refusal([*COMPAT, *file_with(tmp_path, "a=b\nc=\\u1")], ENV)
    assert text.startswith(f"{tmp_path}/serving.properties: line 2: ")
    for arguments in (["--properties", "/p"], ["--strict-config"]):
        assert "this option needs --compat lmi" in refusal(arguments)
        assert "this option needs --compat lmi" in refusal(["m", *arguments, "--compat", "vllm"])


def test_without_compat_nothing_is_read() -> None:
    env = {"OPTION_MODEL_ID": "/m", "HF_MODEL_ID": "/m", "SERVING_JOB_QUEUE_SIZE": "3", "MAX_BATCH_SIZE": "9"}
    config, result = run(LauncherConfig, [], env, "launcher")
    assert changes(config) == {"max_batch_size": 9}
    assert "WARNING" not in result.stderr


def test_secrets_are_hidden(tmp_path: Path) -> None:
    text = "option.hf_token=s3cret\noption.aws=s3cret\noption.max_tokens=99\noption.hf_token.x=s3cret"
    config, result = given(tmp_path, text, {"HF_MODEL_ID": "/m", "OPTION_HF_TOKEN": "s3cret"}, "--env")
    assert config.hf_token == Secret("s3cret")
    assert "s3cret" not in result.output
    assert "option.max_tokens=99" in result.stderr


def test_the_report_lists_the_option_of_each_name(tmp_path: Path) -> None:
    text = """\
engine=Python
option.model_id=s3://bucket/model
option.max_model_len: 4096
option.max_model_length=4096
option.quantize smoothquant
option.trust_remote_code=true
option.hf_token=s3cret
"""
    command = process_command("env", LauncherConfig, None, "")
    env = {**BLANK, **ENV, "OPTION_QUANTIZE": "awq", "HF_MODEL_ID": "org/model", "SM_NUM_GPUS": "2"}
    result = CliRunner().invoke(command, [*COMPAT, *file_with(tmp_path, text)], env=env)
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    outcomes = {}
    for line in lines[lines.index("properties:") + 1 :]:
        given, outcome = line.split("): ", 1)
        outcomes[given + ")"] = outcome
    assert [*outcomes] == [
        "  engine=Python (serving.properties:1)",
        "  option.model_id=s3://bucket/model (serving.properties:2)",
        "  option.max_model_len=4096 (serving.properties:3)",
        "  option.max_model_length=(hidden) (serving.properties:4)",
        "  option.quantize=smoothquant (serving.properties:5)",
        "  option.trust_remote_code=true (serving.properties:6)",
        "  option.hf_token=(hidden) (serving.properties:7)",
        "  OPTION_QUANTIZE=awq (environment)",
        "  HF_MODEL_ID=org/model (environment)",
        "  SM_NUM_GPUS=2 (environment)",
    ]
    starts = (
        *("no effect: ", "refused: 's3://bucket/model' cannot be used: mount the model"),
        *(
            "used as --max-sequence-length 4096",
            "unknown: no such option; did you mean option.max_model_len?",
        ),
        *("refused: 'smoothquant' cannot be used: use ", "used as --trust-remote-code"),
        *("used as HF_TOKEN (hidden)", "overridden by option.quantize in serving.properties:5"),
        *("overridden by option.model_id in serving.properties:2", "used as --num-shard 2"),
    )
    for outcome, start in zip(outcomes.values(), starts, strict=True):
        assert outcome.startswith(start)
    assert "  max_sequence_length: 4096 (option.max_model_len in serving.properties:3)" in lines
    assert "s3cret" not in result.output
