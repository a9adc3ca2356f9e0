"""Lists Hugging Face TGI's option names, which only the launcher accepts and only with `--compat tgi`.

Names that TGI and this service share keep this service's meaning and have no row."""

from tgis.config.aliases.alias import OWN_KERNELS, Alias

NO_TEXT_TEMPLATES = "chat templates are not served by this version"
NO_SCALING = "the model's own config.json says how its positions are scaled: change it there"
NO_TUNNEL = "this service opens no tunnels: leave it out and use an ingress of your own"
CHUNKED = "prompts are computed in chunks beside running requests"


def _shards_of(sharded: str) -> str:
    """Return "1" for `false` and an empty text for `true`, which leaves the number of shards as it is."""
    if sharded not in ("true", "false"):
        raise ValueError("must be true or false")
    return "1" if sharded == "false" else ""


MAPPED = (
    Alias("model_id", means="model_name"),
    Alias("huggingface_hub_cache", means="hf_hub_cache", variable=False),
    Alias("sharded", means="num_shard", why="`false` is 1, `true` sets nothing", convert=_shards_of),
    Alias("max_total_tokens", means="max_sequence_length"),
    Alias("max_input_length", means="max_input_tokens"),
    Alias("max_batch_prefill_tokens", means="max_step_tokens"),
    Alias("max_batch_total_tokens", means="kv_cache_tokens"),
    Alias("validation_workers", means="tokenization_workers"),
    Alias("api_key", means="auth_tokens", why="other processes can read the command line"),
    # Container engines set HOSTNAME to the container's name.
    Alias("hostname", means="bind", variable=False),
    Alias("graceful_termination_timeout", means="shutdown_timeout"),
    Alias("hf_model_id", means="model_name", flag=False),
    Alias("hf_model_revision", means="revision", flag=False),
    Alias("hf_model_quantize", means="quantize", flag=False),
    Alias("hf_model_trust_remote_code", means="trust_remote_code", flag=False, switch=True),
    Alias("sm_num_gpus", means="num_shard", flag=False),
)
WITHOUT_EFFECT = (
    Alias("tokenizer_config_path", why=NO_TEXT_TEMPLATES),
    Alias("tokenizer_name", why="the tokenizer is the model's own"),
    Alias("disable_custom_kernels", why=OWN_KERNELS, variable=False, switch=True),
    Alias("payload_limit", why="the gRPC port has a limit of its own"),
    Alias("max_image_fetch_size", why="inputs are text"),
    Alias("enable_prefill_logprobs", why="a request may always ask for them", switch=True),
    Alias("waiting_served_ratio", why=CHUNKED),
    Alias("prometheus_port", why="metrics are on the HTTP port"),
    Alias("usage_stats", why="this service never reports to anyone"),
    Alias("ngrok_authtoken", why=NO_TUNNEL),
    Alias("ngrok_edge", why=NO_TUNNEL),
    Alias("attention", why=OWN_KERNELS, flag=False),
    Alias("use_flash_attention", why=OWN_KERNELS, flag=False),
    Alias("prefix_caching", why="equal prefixes are always shared", flag=False),
    Alias("prefill_chunking", why=CHUNKED, flag=False),
    Alias("tgi_wiggle_room", why="the cache is counted in blocks, not estimated", flag=False),
    Alias("log_colorize", why="logs are plain text or JSON", flag=False),
)
REFUSED = (
    Alias(
        "kv_cache_dtype", why="the cache has the type of the weights (--dtype): leave it out", refused=True
    ),
    Alias("weights_cache_override", why="give that directory as --model-id", refused=True),
    Alias("rope_scaling", why=NO_SCALING, refused=True),
    Alias("rope_factor", why=NO_SCALING, refused=True),
    Alias("ngrok", why=NO_TUNNEL, refused=True, switch=True),
)
TGI_NAMES = MAPPED + WITHOUT_EFFECT + REFUSED
SHARED_SHORT_FLAG = "-g"  # TGI's --graceful-termination-timeout, our --grpc-port
