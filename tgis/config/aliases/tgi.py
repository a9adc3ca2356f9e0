"""Lists Hugging Face TGI's option names, which only the launcher accepts and only with `--compat tgi`.

Each name has an option that it means, a reason why it has no effect, or a reason why the start is refused.
Names that TGI and this service share keep this service's meaning and have no row."""

from tgis.config.aliases.alias import Foreign

NO_TEXT_TEMPLATES = "chat templates are not served by this version"
NO_SCALING = "the model's own config.json says how its positions are scaled: change it there"
NO_KEY = "keys are read from a file: write them into one, a line each, and give it as --auth-tokens-path"
NO_TUNNEL = "this service opens no tunnels: leave it out and use an ingress of yours"
NO_WATERMARK = "no request can ask for a watermark"
CHUNKED = "prompts are computed in chunks beside running requests"
OWN_KERNELS = "attention is always paged and unpadded, with the kernels of this service"


def _shards_of(sharded: str) -> str:
    """Return "1" for `false` and an empty text for `true`, which leaves the number of shards as it is."""
    if sharded not in ("true", "false"):
        raise ValueError("must be true or false")
    return "1" if sharded == "false" else ""


MAPPED = (
    Foreign("model_id", means="model_name"),
    Foreign("huggingface_hub_cache", means="hf_hub_cache", variable=False),
    Foreign("sharded", means="num_shard", why="`false` is 1, `true` says nothing", convert=_shards_of),
    Foreign("max_total_tokens", means="max_sequence_length"),
    Foreign("max_batch_prefill_tokens", means="max_step_tokens"),
    Foreign("max_batch_total_tokens", means="kv_cache_tokens"),
    Foreign("validation_workers", means="tokenization_workers"),
    Foreign(
        "hostname", means="bind", variable=False
    ),  # container engines set HOSTNAME to the container's name
    Foreign("graceful_termination_timeout", means="shutdown_timeout"),
    Foreign("hf_model_id", means="model_name", flag=False),
    Foreign("hf_model_revision", means="revision", flag=False),
    Foreign("hf_model_quantize", means="quantize", flag=False),
    Foreign("hf_model_trust_remote_code", means="trust_remote_code", flag=False, switch=True),
    Foreign("sm_num_gpus", means="num_shard", flag=False),
)
WITHOUT_EFFECT = (
    Foreign("tokenizer_config_path", why=NO_TEXT_TEMPLATES),
    Foreign("tokenizer_name", why="the tokenizer is the model's own"),
    Foreign("disable_custom_kernels", why=OWN_KERNELS, variable=False, switch=True),
    Foreign("max_best_of", why="a request gets one answer"),
    Foreign("max_stop_sequences", why="a request may have 6 stop sequences of 240 bytes"),
    Foreign("max_input_tokens", why="an input may be as long as max_sequence_length allows"),
    Foreign("max_input_length", why="an input may be as long as max_sequence_length allows"),
    Foreign("max_client_batch_size", why="max_concurrent_requests bounds the inputs of a call"),
    Foreign("payload_limit", why="the gRPC port has a limit of its own"),
    Foreign("max_image_fetch_size", why="inputs are text"),
    Foreign("disable_grammar_support", why="guided decoding stays on", switch=True),
    Foreign("enable_prefill_logprobs", why="a request may always ask for them", switch=True),
    Foreign("waiting_served_ratio", why=CHUNKED),
    Foreign("cuda_graphs", why="no graphs are captured"),
    Foreign("cuda_memory_fraction", why="the cache takes of what weights and the largest step leave"),
    Foreign("watermark_gamma", why=NO_WATERMARK),
    Foreign("watermark_delta", why=NO_WATERMARK),
    Foreign("prometheus_port", why="metrics are on the HTTP port"),
    Foreign("cors_allow_origin", why="no browser can call gRPC"),
    Foreign("usage_stats", why="this service never reports to anyone"),
    Foreign("ngrok_authtoken", why=NO_TUNNEL),
    Foreign("ngrok_edge", why=NO_TUNNEL),
    Foreign("attention", why=OWN_KERNELS, flag=False),
    Foreign("use_flash_attention", why=OWN_KERNELS, flag=False),
    Foreign("prefix_caching", why="equal prefixes are always shared", flag=False),
    Foreign("prefill_chunking", why=CHUNKED, flag=False),
    Foreign("tgi_wiggle_room", why="the cache is counted in blocks, not estimated", flag=False),
    Foreign("log_colorize", why="logs are plain text or JSON", flag=False),
    Foreign("compute_type", why="it is not told to clients", flag=False),
)
REFUSED = (
    Foreign(
        "kv_cache_dtype", why="the cache has the type of the weights (--dtype): leave it out", refused=True
    ),
    Foreign("weights_cache_override", why="give that directory as --model-id", refused=True),
    Foreign("rope_scaling", why=NO_SCALING, refused=True),
    Foreign("rope_factor", why=NO_SCALING, refused=True),
    Foreign("api_key", why=NO_KEY, refused=True),
    Foreign("ngrok", why=NO_TUNNEL, refused=True, switch=True),
)
TGI_NAMES = MAPPED + WITHOUT_EFFECT + REFUSED
SHARED_SHORT_FLAG = "-g"  # TGI's --graceful-termination-timeout, our --grpc-port
