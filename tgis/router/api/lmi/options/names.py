"""Lists the option names of DJL's LMI containers. Only the launcher reads them, and only with `--compat lmi`.
A name is a key of serving.properties; keys with the prefix `option.` belong to the model, others to the
server. vLLM's table covers the keys that LMI passes on to vLLM."""

import difflib
from collections.abc import Mapping

from tgis.config.aliases.alias import OWN_KERNELS, Alias
from tgis.router.api.lmi.options.values import (
    only,
    switch,
    to_bytes,
    to_dtype,
    to_generation_config,
    to_model,
    to_reservation,
    to_scheme,
)
from tgis.router.api.vllm.options.names import VLLM_NAMES

PREFIX = "option."
ARGUMENTS = "args."
MODEL_DIR, MODEL_ID = "option.model_dir", "option.model_id"
TENSOR_PARALLEL = "option.tensor_parallel_degree"
QUEUE = "job_queue_size"
BATCHED = "running requests are always batched at every step: see option.max_rolling_batch_size"
ONE_GROUP = "one group of shards serves the model; for more, run several services behind a load balancer"
OTHER_ENGINE = "it configures an engine that this service does not have"
NO_CODE = "handler code of a model is not run: leave it out and set its parameters in the requests"
NO_NEURON = "Neuron devices are not supported"
RESTARTED = "lost shards are restarted: see --recovery-timeout"
STATUSES = "the statuses are LMI's defaults"
STEP_TIME = "from a request's acceptance to its first token"
FRONT_END = {
    *("model", "host", "config", "root_path", "uds", "middleware", "api_key", "log_config_file"),
    *("allowed_origins", "allowed_methods", "allowed_headers", "allow_credentials", "lora_modules"),
    *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers", "enable_ssl_refresh"),
    *("uvicorn_log_level", "disable_uvicorn_access_log", "disable_fastapi_docs", "api_server_count"),
    *("h11_max_incomplete_event_size", "h11_max_header_count", "tool_server", "tokens_only"),
}
"""Options of vLLM's HTTP server, which LMI does not pass on."""


def _key(name: str, means: str | None = None, why: str = "", **more: object) -> Alias:
    return Alias(name, means=means, why=why, flag=False, variable=False, **more)  # type: ignore[arg-type]


def _keys(why: str, *names: str, refused: bool = False) -> tuple[Alias, ...]:
    return tuple(_key(name, why=why, refused=refused) for name in names)


def _options(why: str, *names: str, refused: bool = False) -> tuple[Alias, ...]:
    return _keys(why, *(PREFIX + name for name in names), refused=refused)


def _only(name: str, allowed: str, why: str, advice: str) -> Alias:
    """Return a name whose allowed values are the service's fixed behaviour. Other values are refused."""
    why += f"; values other than {allowed.replace('|', ', ')} are refused"
    return _key(name, why=why, refusal_of=only(allowed, advice))


def _both(name: str, means: str, why: str) -> tuple[Alias, Alias]:
    """Return the aliases of a name that LMI reads with and without `option.`."""
    return _key(PREFIX + name, means, why), _key(name, means, why)


MAPPED = (
    _key(MODEL_DIR, "model_name", "if option.model_id is not given"),
    _key(MODEL_ID, "model_name", "a folder or an id on the hub", convert=to_model),
    _key("option.revision", "revision"),
    _key("option.hf_token", "hf_token", "prefer the variable HF_TOKEN, which stays out of the file"),
    _key("option.trust_remote_code", "trust_remote_code", convert=switch()),
    _key("option.dtype", "dtype", "fp16, bf16 and fp32 are accepted too", convert=to_dtype),
    _key(
        TENSOR_PARALLEL,
        "num_shard",
        "max and -1 are the number of visible GPUs, or 1; the model is served once: other GPUs stay unused",
    ),
    _key(
        "option.quantize",
        "quantize",
        "bitsandbytes4 is bitsandbytes-nf4; bitsandbytes8 is bitsandbytes, which means 8 bits",
        convert=to_scheme,
    ),
    _key("option.load_in_4bit", "quantize", "bitsandbytes-nf4", convert=switch("bitsandbytes-nf4")),
    _key("option.load_in_8bit", "quantize", "bitsandbytes", convert=switch("bitsandbytes")),
    _key("option.max_rolling_batch_size", "max_batch_size"),
    _key("option.max_num_sequences", "max_batch_size"),
    _key(
        "option.max_rolling_batch_prefill_tokens", "max_step_tokens", "longer prompts are split into chunks"
    ),
    _key("option.max_tokens", "max_sequence_length"),
    _key("option.n_positions", "max_sequence_length"),
    _key("option.max_input_len", "max_input_tokens"),
    _key("option.max_output_len", "max_new_tokens"),
    _key("option.tokens_per_block", "block_size"),
    _key("option.block_size", "block_size"),
    _key("option.kv_cache_dtype", "kv_cache_dtype"),
    _key(
        "option.kv_cache_free_gpu_mem_fraction",
        "kv_cache_memory_fraction",
        "a share of the memory that the model leaves free, not of all memory",
    ),
    _key(
        "option.batch_scheduler_policy",
        "reserve_output",
        "guaranteed_no_evict sets it; max_utilization is the behaviour without it",
        convert=to_reservation,
    ),
    _key("option.enable_cuda_graph", "cuda_graphs", "false is 0", convert=switch(on="", off="0")),
    _key("option.output_formatter", "lmi_output_formatter"),
    _key("option.chat_template", "chat_template", "a file"),
    _key("option.tool_call_parser", "tool_call_parser"),
    _key("option.reasoning_parser", "reasoning_parser"),
    _key("option.served_model_name", "served_model_name"),
    _key("option.generation_config", "generation_config", "vllm is none", convert=to_generation_config),
    _key("option.override_generation_config", "override_generation_config"),
    *_both("model_loading_timeout", "startup_timeout", "the service ends if the model is not loaded by then"),
    *_both("predict_timeout", "first_token_timeout", STEP_TIME),
    *_both("chunked_read_timeout", "next_token_timeout", "from each token to the next"),
    _key(QUEUE, "max_concurrent_requests", "the number of waiting requests; --max-batch-size is added to it"),
    _key("max_request_size", "max_message_bytes"),
    _key("max_payload_in_mb", "max_message_bytes", "in MiB", convert=to_bytes),
)
WITHOUT_EFFECT = (
    _only(
        "engine", "Python|MPI", "shards are separate processes", "use Python: DJL's engines are not available"
    ),
    _only(
        "option.rolling_batch",
        "auto|vllm|lmi-dist|scheduler|trtllm|disable",
        BATCHED,
        "use auto, or leave it out",
    ),
    _only("option.entryPoint", "djl_python.*", "the API is that of LMI's own handlers", NO_CODE),
    _only("option.task", "text-generation", "the service generates text", "only text-generation is served"),
    _only("option.device_map", "auto", "layers are split over the shards", "use auto, or leave it out"),
    _only(
        "option.decoding_strategy",
        "greedy|sample",
        "each request sets it with do_sample",
        "use greedy or sample, and set do_sample in requests",
    ),
    _only(
        "option.pipeline_parallel_degree",
        "1",
        "layers are split over the shards",
        "use option.tensor_parallel_degree, which splits each layer over the shards",
    ),
    *_keys(BATCHED, "batch_size", "max_batch_delay"),
    *_options(BATCHED, "async_mode", "enable_streaming"),
    *_keys("idle shards keep running", "max_idle_time"),
    *_keys(ONE_GROUP, "minWorkers", "maxWorkers", "gpu.minWorkers", "gpu.maxWorkers"),
    *_keys(ONE_GROUP, "cpu.minWorkers", "cpu.maxWorkers", "min_workers", "max_workers"),
    *_keys("CUDA_VISIBLE_DEVICES selects the GPUs", "load_on_devices"),
    *_keys("one model is served: set option.model_id", "load_models", "model_store"),
    *_keys("use --bind and --port", "inference_address", "management_address"),
    *_keys(RESTARTED, "retry_threshold", "fail_fast"),
    *_keys(RESTARTED, "error_rate_model", "error_rate_server", "error_rate_any", "error_rate_wlm"),
    *_keys(STATUSES, "throttle_error_http_code", "wlm_error_http_code"),
    *_keys(STATUSES, "bad_request_http_code", "server_error_http_code"),
    *_options("shards always load in parallel", "parallel_loading"),
    *_options("shards are separate processes", "mpi_mode"),
    *_options(OWN_KERNELS, "paged_attention", "disable_flash_attn"),
    *_options("weights are read in parts, without a second copy", "low_cpu_mem_usage"),
    *_options("it configures quantize=smoothquant, which is refused", "smoothquant_alpha"),
    *_options(OTHER_ENGINE, "triangular_masking", "return_tuple", "training_mp_size"),
    *_options(OTHER_ENGINE, "max_sparsity", "max_splits"),
    *_options(OTHER_ENGINE, "use_custom_all_reduce", "enable_trt_overlap", "baichuan_model_version"),
    *_options(NO_NEURON, "unroll", "neuron_optimize_level", "context_length_estimate"),
    *_options(NO_NEURON, "load_split_model", "compiled_graph_path"),
    *_keys("arguments of a model's own code are not read", ARGUMENTS + "*"),
)
REFUSED = (
    *_options("use --rope-scaling and --rope-factor instead", "rope_scaling", refused=True),
    *_options("convert it to safetensors and set option.model_id to the folder", "checkpoint", refused=True),
    *_options(
        "use option.quantize=bitsandbytes8, or fp8, or a quantized checkpoint instead",
        "smoothquant_per_token",
        "smoothquant_per_channel",
        "multi_query_mode",
        refused=True,
    ),
)
LMI_NAMES = MAPPED + WITHOUT_EFFECT + REFUSED
PASSED_ON = {
    PREFIX + one.name: one
    for one in VLLM_NAMES
    if one.flag and one.name not in FRONT_END and PREFIX + one.name not in {row.name for row in LMI_NAMES}
}
KEYS: Mapping[str, Alias] = {one.name: one for one in LMI_NAMES} | PASSED_ON
SIMPLE_NAMES = {
    "HF_MODEL_ID": MODEL_ID,
    "HF_REVISION": "option.revision",
    "HF_TASK": "option.task",
    "HF_MODEL_TRUST_REMOTE_CODE": "option.trust_remote_code",
    "HF_MODEL_QUANTIZE": "option.quantize",
    "TENSOR_PARALLEL_DEGREE": TENSOR_PARALLEL,
    "PIPELINE_PARALLEL_DEGREE": "option.pipeline_parallel_degree",
    "MAX_BATCH_SIZE": "option.max_rolling_batch_size",
    "MAX_CONCURRENT_REQUESTS": QUEUE,
    "MAX_BATCH_PREFILL_TOKENS": "option.max_rolling_batch_prefill_tokens",
    "CUDA_MEMORY_FRACTION": "option.gpu_memory_utilization",
    "ENABLE_CUDA_GRAPHS": "option.enable_cuda_graph",
    "MODEL_LOADING_TIMEOUT": "option.model_loading_timeout",
    "PREDICT_TIMEOUT": "option.predict_timeout",
    "SAGEMAKER_STARTUP_TIMEOUT": "option.model_loading_timeout",
    "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "option.predict_timeout",
    "SAGEMAKER_MAX_REQUEST_SIZE": "max_request_size",
    "SAGEMAKER_MAX_PAYLOAD_IN_MB": "max_payload_in_mb",
    "SAGEMAKER_NUM_MODEL_WORKERS": "maxWorkers",
    "SM_NUM_GPUS": TENSOR_PARALLEL,
}
"""Keys by variable, for variables without the prefixes OPTION_ and SERVING_. The first variable of a key has
precedence."""
DEFAULT_QUEUE = 1000
DEFAULTS = {
    "http_api": "lmi",
    "port": 8080,
    "max_message_bytes": 64 << 20,
    "startup_timeout": 1200.0,
    "first_token_timeout": 240.0,
    "next_token_timeout": 120.0,
}
"""LMI's defaults for options that the operator does not set."""


def find_alias(key: str) -> Alias | None:
    return KEYS.get(ARGUMENTS + "*" if key.startswith(ARGUMENTS) else key)


def describe_unknown(key: str) -> str:
    """Return an explanation for a key without an alias, with the most similar known name."""
    other = key.removeprefix(PREFIX) if key.startswith(PREFIX) else PREFIX + key
    if other in KEYS:
        return f"LMI reads it as {other} only"
    close = difflib.get_close_matches(key, KEYS, n=1)
    return "no such option" + (f"; did you mean {close[0]}?" if close else "")
