"""Lists vLLM's option names. Only the launcher accepts them, and only with `--compat vllm`.
Names that vLLM and this service share keep this service's meaning and are not listed. vLLM reads no variables
named after its flags, so an alias has either a flag or a variable."""

from tgis.config.aliases.alias import OWN_KERNELS, Alias
from tgis.config.option_names import OptionNames
from tgis.router.api.vllm.options.arguments import rewrite
from tgis.router.api.vllm.options.values import (
    at_most,
    find_speculator,
    only,
    to_adapters,
    to_drafts,
    to_engine,
    to_floor,
    to_graphs,
    to_length,
    to_level,
    to_number,
    to_origins,
    to_scheme,
    to_speculator,
)

BLOCK_SIZE = 16  # tokens per block in vLLM, unless --block-size sets another number
CHUNKED = "prompts are always computed in chunks beside running requests"
COMPILED_NOTHING = "the model's code is not compiled; --cuda-graphs selects the steps captured as CUDA graphs"
HTTP_LIMITS = "--max-message-bytes and --max-metadata-bytes limit the size of requests"
IN_MEMORY = "--adapter-cache-size-mb limits the memory of adapters, whatever their number and rank"
LOCAL_LOGS = "a request is one line of the log, without its texts: see --log-level and --log-text-chars"
NO_CODE = "this service does not run code given by an option: leave it out"
NO_SCALING = "position scaling is read from the model's config.json: change it there"
NO_TRANSFER = "caches are not transferred between servers: leave it out"
SHARED = "equal prefixes are always shared, except between different values of `cache_salt`"
POLICIES = "fcfs: 0, so that requests can only be served later; priority: the lowest value"
ONE_GROUP = "a service is one group of shards: run several behind a load balancer"
ONLY_TEXT = "inputs are text"
ONLY_TEXT_REFUSED = "the service only generates text: leave it out"
OWN_PROCESSES = "shards are separate processes, connected according to --num-shard and --nnodes"
OWN_TOKENIZER = "the tokenizer is the model's own: leave it out, or change the model's files"


def _flags(why: str, *names: str, switch: bool = False) -> tuple[Alias, ...]:
    """Return flags without effect."""
    return tuple(Alias(name, why=why, variable=False, switch=switch) for name in names)


def _refused(why: str, *names: str, switch: bool = False) -> tuple[Alias, ...]:
    return tuple(Alias(name, why=why, refused=True, variable=False, switch=switch) for name in names)


def _only(name: str, allowed: str, advice: str, short: str | None = None) -> Alias:
    """Return a flag whose allowed values are the service's fixed behaviour. Other values are refused."""
    why = f"{allowed.replace('|', ' or ')} is the fixed behaviour; other values are refused: {advice}"
    return Alias(name, why=why, short=short, variable=False, refusal_of=only(name, allowed, advice))


def _variables(why: str, *names: str) -> tuple[Alias, ...]:
    return tuple(Alias(name.lower(), why=why, flag=False) for name in names)


def _means(name: str, means: str, why: str = "", **more: object) -> Alias:
    return Alias(name, means=means, why=why, variable=False, **more)  # type: ignore[arg-type]


def _blocks_to_tokens(text: str) -> str:
    return str(int(text) * BLOCK_SIZE)


MAPPED = (
    _means("model", "model_name", "or the argument before all flags, as in `vllm serve MODEL`"),
    _means("host", "bind"),
    _means("download_dir", "hf_hub_cache"),
    _means("tokenizer", "tokenizer_name"),
    _means("max_model_len", "max_sequence_length", "8k is 8000, 8K is 8192", convert=to_length),
    _means("max_num_seqs", "max_batch_size", convert=to_number),
    _means("max_num_batched_tokens", "max_step_tokens", convert=to_number),
    _means("gpu_memory_utilization", "cuda_memory_fraction"),
    _means("num_gpu_blocks_override", "kv_cache_tokens", "a block is 16 tokens", convert=_blocks_to_tokens),
    _means("tensor_parallel_size", "num_shard", short="-tp"),
    _means("api_server_count", "router_workers", short="-asc"),
    _means(
        "quantization",
        "quantize",
        "gptq_marlin is gptq, awq_marlin is awq; gguf needs no option",
        short="-q",
        convert=to_scheme,
    ),
    _means("model_impl", "deployment_framework", "vllm is the service's own engine", convert=to_engine),
    _means("enforce_eager", "cuda_graphs", "sets it to 0", switch=True, convert=to_graphs),
    _means("cudagraph_capture_sizes", "cuda_graphs", "several numbers may follow"),
    _means("cuda_graph_sizes", "cuda_graphs", "several numbers may follow"),
    _means("lora_modules", "lora_adapters", "NAME=PATH or JSON objects", convert=to_adapters),
    _means("num_speculative_tokens", "speculate"),
    _means(
        "speculative_config",
        "speculate",
        "JSON; `model`, a speculator, is --speculator, except for ngram; the method mtp is --speculator mtp",
        short="-sc",
        convert=to_drafts,
        convert_more=find_speculator,
    ),
    _means("speculative_model", "speculator", "[ngram] is --speculate alone", convert=to_speculator),
    _means("otlp_traces_endpoint", "otlp_endpoint"),
    _means("allowed_origins", "cors_allow_origin", "a JSON list", convert=to_origins),
    _means("ssl_keyfile", "tls_key_path"),
    _means("ssl_certfile", "tls_cert_path", "sets --http-tls too", also=(("http_tls", True),)),
    _means("api_key", "auth_tokens", "several keys may follow; other processes can read the command line"),
    _means("hf_token", "hf_token", "other processes can read the command line"),
    Alias("vllm_api_key", means="auth_tokens", flag=False),
    Alias("vllm_allow_runtime_lora_updating", means="runtime_adapters", flag=False, switch=True),
    Alias("vllm_logging_level", means="log_level", flag=False, convert=to_level),
    Alias(
        "vllm_lora_resolver_cache_dir",
        means="adapter_cache",
        why="an adapter's name is its folder in this directory",
        flag=False,
    ),
)
WITHOUT_EFFECT = (
    *_flags(
        "tool calls and reasoning are always parsed if their format is known",
        "enable_auto_tool_choice",
        switch=True,
    ),
    *_flags(SHARED, "enable_prefix_caching", "no_enable_prefix_caching", switch=True),
    *_flags(SHARED, "prefix_caching_hash_algo"),
    *_flags("there is one cache of blocks", "disable_hybrid_kv_cache_manager", switch=True),
    *_flags(CHUNKED, "enable_chunked_prefill", "no_enable_chunked_prefill", switch=True),
    *_flags(
        CHUNKED,
        "max_num_partial_prefills",
        "max_long_partial_prefills",
        "long_prefill_token_threshold",
        "scheduler_delay_factor",
    ),
    *_flags(
        "steps are always sent before the previous results arrive: see --steps-in-flight",
        "async_scheduling",
        "disable_async_output_proc",
        "multi_step_stream_outputs",
        switch=True,
    ),
    *_flags(
        "--steps-in-flight sets the number of steps sent ahead", "num_scheduler_steps", "stream_interval"
    ),
    *_flags("preempted requests are recomputed", "swap_space", "preemption_mode"),
    *_flags(LOCAL_LOGS, "max_log_len", "uvicorn_log_level", "disable_access_log_for_endpoints"),
    *_flags(
        LOCAL_LOGS,
        "disable_log_requests",
        "enable_log_requests",
        "enable_log_outputs",
        "enable_log_deltas",
        "disable_uvicorn_access_log",
        "log_error_stack",
        switch=True,
    ),
    *_flags("metrics are always on", "disable_log_stats", "enable_server_load_tracking", switch=True),
    *_flags("traces always have all details", "collect_detailed_traces"),
    *_flags("LoRA adapters are always served", "enable_lora", switch=True),
    *_flags(IN_MEMORY, "max_loras", "max_cpu_loras", "max_lora_rank", "lora_extra_vocab_size", "lora_dtype"),
    *_flags("adapters are split like the model's layers", "fully_sharded_loras", switch=True),
    *_flags("grammars always use llguidance", "guided_decoding_backend", "structured_outputs_config"),
    *_flags(COMPILED_NOTHING, "max_seq_len_to_capture"),
    Alias("compilation_config", why=COMPILED_NOTHING, variable=False, short="-O"),
    *_flags(OWN_KERNELS, "attention_backend"),
    *_flags(OWN_KERNELS, "disable_cascade_attn", "disable_sliding_window", switch=True),
    *_flags(OWN_PROCESSES, "distributed_executor_backend", "max_parallel_loading_workers"),
    *_flags(
        OWN_PROCESSES,
        "disable_custom_all_reduce",
        "ray_workers_use_nsight",
        "worker_use_ray",
        "enable_expert_parallel",
        switch=True,
    ),
    *_flags("a request without a seed gets a random one; send `seed` for the same text", "seed"),
    *_flags(ONLY_TEXT, "limit_mm_per_prompt", "mm_processor_kwargs", "mm_processor_cache_gb"),
    *_flags(ONLY_TEXT, "allowed_local_media_path", "allowed_media_domains"),
    *_flags(ONLY_TEXT, "skip_mm_profiling", "disable_mm_preprocessor_cache", switch=True),
    *_flags(ONLY_TEXT, "language_model_only", switch=True),
    *_flags("a checkpoint's files are selected by their names", "ignore_patterns"),
    *_flags("progress is logged", "use_tqdm_on_load", switch=True),
    *_flags("a model's code has the revision of its weights: see --revision", "code_revision"),
    *_flags(
        "parts of a message are joined for templates that accept only text", "chat_template_content_format"
    ),
    *_flags("it is always on", "enable_prompt_tokens_details", "enable_request_id_headers", switch=True),
    *_flags("the service serves no documentation pages", "disable_fastapi_docs", switch=True),
    *_flags("certificates are always reloaded when they change", "enable_ssl_refresh", switch=True),
    *_flags(HTTP_LIMITS, "h11_max_incomplete_event_size", "h11_max_header_count"),
    *_flags("the API accepts GET and POST, and no cookies", "allowed_methods", "allowed_headers"),
    *_flags("the API accepts no cookies", "allow_credentials", switch=True),
    *_flags("it configures vLLM's first engine", "tokenizer_pool_size", "tokenizer_pool_type"),
    *_flags("it configures vLLM's first engine", "use_v2_block_manager", switch=True),
    Alias(
        "max_logprobs",
        why="the maximum is always 20; higher values are refused",
        variable=False,
        refusal_of=at_most("max_logprobs", 20, "the maximum is 20"),
    ),
    _only("load_format", "auto|safetensors|hf|bitsandbytes|gguf", "convert the model to safetensors"),
    _only("config_format", "auto|hf", "use a model in Hugging Face's format"),
    _only("tokenizer_mode", "auto|hf|slow", OWN_TOKENIZER),
    _means("scheduling_policy", "priority_floor", POLICIES, convert=to_floor),
    _only("pipeline_parallel_size", "1", "layers are split over shards: use --num-shard", "-pp"),
    _only("data_parallel_size", "1", ONE_GROUP, "-dp"),
    _only("decode_context_parallel_size", "1", "use --num-shard", "-dcp"),
    _only("task", "auto|generate", ONLY_TEXT_REFUSED),
    _only("runner", "auto|generate", ONLY_TEXT_REFUSED),
    _only("convert", "auto|none", ONLY_TEXT_REFUSED),
    _only("cpu_offload_gb", "0|0.0", "weights stay on the device of --device"),
    _only("response_role", "assistant", "the role of responses is always assistant"),
    _only("ssl_cert_reqs", "0", "use --tls-client-ca-cert-path and --http-api-port"),
    _only("fingerprint_mode", "none", "responses have no fingerprint"),
    *_variables(OWN_KERNELS, "VLLM_ATTENTION_BACKEND", "VLLM_FLASH_ATTN_VERSION"),
    *_variables(
        OWN_PROCESSES, "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_HOST_IP"
    ),
    *_variables("there is one engine", "VLLM_USE_V1"),
    *_variables("this service collects no usage statistics", "VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK"),
    *_variables("use --device", "VLLM_TARGET_DEVICE"),
    *_variables("free memory determines the cache's size: see --kv-cache-tokens", "VLLM_CPU_KVCACHE_SPACE"),
    *_variables("use --cpu-threads", "VLLM_CPU_OMP_THREADS_BIND"),
    *_variables("it is a path that only vLLM uses", "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT"),
    *_variables(LOCAL_LOGS, "VLLM_LOGGING_CONFIG_PATH", "VLLM_CONFIGURE_LOGGING"),
    *_variables("use metrics", "VLLM_LOG_STATS_INTERVAL"),
    *_variables("see --recovery-timeout", "VLLM_ENGINE_ITERATION_TIMEOUT_S", "VLLM_RPC_TIMEOUT"),
    *_variables("adapters are looked up by their ids without plugins", "VLLM_PLUGINS"),
)
REFUSED = (
    *_refused(NO_SCALING, "rope_theta"),
    *_refused("change the model's config.json instead", "hf_overrides", "hf_config_path"),
    *_refused(OWN_TOKENIZER, "tokenizer_revision"),
    *_refused(OWN_TOKENIZER, "skip_tokenizer_init", switch=True),
    *_refused("the cache is counted in tokens: use --kv-cache-tokens", "kv_cache_memory_bytes"),
    *_refused("use flags or variables instead of its lines", "config"),
    *_refused(
        "for your own format, use --chat-template and parse responses in the client",
        "tool_parser_plugin",
        "reasoning_parser_plugin",
    ),
    *_refused("tools run in the client: leave it out", "tool_server"),
    *_refused("leave `tools` out of such requests", "exclude_tools_when_tool_choice_none", switch=True),
    *_refused(
        "only the operator sets the template: use --chat-template",
        "trust_request_chat_template",
        switch=True,
    ),
    *_refused("send chat_template_kwargs with requests", "default_chat_template_kwargs"),
    *_refused("send return_tokens_as_token_ids with requests", "return_tokens_as_token_ids", switch=True),
    *_refused("send stream_options with requests", "enable_force_include_usage", switch=True),
    *_refused("embeddings as prompts are not supported: leave it out", "enable_prompt_embeds", switch=True),
    *_refused(
        "clients read the tokenizer from the hub: leave it out", "enable_tokenizer_info_endpoint", switch=True
    ),
    *_refused(
        "client certificates need a separate port: use --tls-client-ca-cert-path and --http-api-port",
        "ssl_ca_certs",
    ),
    *_refused("the TLS library chooses safe ciphers: leave it out", "ssl_ciphers"),
    *_refused("let the proxy remove the prefix from paths", "root_path"),
    *_refused("Unix sockets are not supported for the API: use --port", "uds"),
    *_refused("use --json-output and --log-level", "log_config_file"),
    *_refused(
        NO_CODE,
        "middleware",
        "logits_processors",
        "logits_processor_pattern",
        "worker_cls",
        "worker_extension_cls",
        "scheduler_cls",
        "io_processor_plugin",
        "additional_config",
        "model_loader_extra_config",
    ),
    *_refused(NO_TRANSFER, "kv_transfer_config", "ec_transfer_config"),
    *_refused("use --kv-events-endpoint", "kv_events_config"),
    *_refused(
        ONE_GROUP,
        "data_parallel_rank",
        "data_parallel_start_rank",
        "data_parallel_size_local",
        "data_parallel_address",
        "data_parallel_rpc_port",
        "data_parallel_backend",
    ),
    *_refused(ONE_GROUP, "data_parallel_hybrid_lb", "data_parallel_external_lb", switch=True),
    *_refused("a stopped service frees its memory: leave it out", "enable_sleep_mode", switch=True),
    *_refused("experts are not moved between shards: leave it out", "enable_eplb", "enable_dbo", switch=True),
    *_refused("only text is supported: use --lora-modules", "default_mm_loras"),
    *_refused("adapters with biases must be merged into the model", "enable_lora_bias", switch=True),
    *_refused("set the adapter's scale in its adapter_config.json", "long_lora_scaling_factors"),
    *_refused(
        "serve the model with --quantization bitsandbytes and the adapter as --lora-modules",
        "qlora_adapter_name_or_path",
    ),
    *_refused(
        "soft prompts are read from --prefix-store-path: leave it out", "enable_prompt_adapter", switch=True
    ),
    *_refused(
        "soft prompts are read from --prefix-store-path: leave it out",
        "max_prompt_adapters",
        "max_prompt_adapter_token",
        "prompt_adapters",
    ),
    *_refused("send token ids as prompts: leave it out", "tokens_only", switch=True),
    *_refused(ONLY_TEXT_REFUSED, "override_pooler_config", "pooler_config"),
    Alias(
        "vllm_use_modelscope",
        why="models come from Hugging Face's hub: download the model first",
        refused=True,
        flag=False,
        switch=True,
    ),
)
VLLM_NAMES = MAPPED + WITHOUT_EFFECT + REFUSED
DEFAULTS = {"http_api": "openai", "port": 8000, "num_shard": 1, "metrics_alias": "vllm"}
"""vLLM's defaults for options that the operator does not set."""
OPTIONS = OptionNames("vllm", "vLLM", VLLM_NAMES, "--model", DEFAULTS, rewrite=rewrite)
