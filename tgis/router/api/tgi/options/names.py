"""Lists the option names of Hugging Face's TGI. Only the launcher accepts them, and only with `--compat tgi`.
Names that TGI and this service share keep this service's meaning and are not listed."""

from collections.abc import Collection, Sequence

from tgis.config.aliases.alias import OWN_KERNELS, Alias
from tgis.config.option_names import OptionNames

NO_TUNNEL = "this service opens no tunnels: leave it out and use your own ingress"
CHUNKED = "prompts are computed in chunks beside running requests"

REPEATED = ("--cors-allow-origin",)
"""Flags whose values are joined by commas."""

MAPPED = (
    Alias("model_id", means="model_name"),
    Alias("hf_model_id", means="model_name", flag=False),
    Alias(
        "weights_cache_override",
        means="model_name",
        why="the model is read from this directory; --model-id is then its name for clients",
        replaces_into="served_model_name",
    ),
    Alias("huggingface_hub_cache", means="hf_hub_cache", variable=False),
    Alias("max_total_tokens", means="max_sequence_length"),
    Alias("max_input_length", means="max_input_tokens"),
    Alias("max_batch_prefill_tokens", means="max_step_tokens"),
    Alias("max_batch_total_tokens", means="kv_cache_tokens"),
    Alias("validation_workers", means="tokenization_workers"),
    Alias("payload_limit", means="max_message_bytes", why="it also limits gRPC requests"),
    Alias("api_key", means="auth_tokens", why="other processes can read the command line"),
    # The variable HOSTNAME is not read, because container engines set it to the container's name.
    Alias("hostname", means="bind", variable=False),
    Alias("graceful_termination_timeout", means="shutdown_timeout"),
    Alias("hf_api_token", means="hf_token", flag=False),
    Alias("hf_model_revision", means="revision", flag=False),
    Alias("hf_model_quantize", means="quantize", flag=False),
    Alias("hf_model_trust_remote_code", means="trust_remote_code", flag=False, switch=True),
    Alias("sm_num_gpus", means="num_shard", flag=False),
)
WITHOUT_EFFECT = (
    Alias("disable_custom_kernels", why=OWN_KERNELS, variable=False, switch=True),
    Alias("max_image_fetch_size", why="inputs are text"),
    Alias("enable_prefill_logprobs", why="every request may ask for them", switch=True),
    Alias("waiting_served_ratio", why=CHUNKED),
    Alias("prometheus_port", why="metrics are on the HTTP port"),
    Alias("usage_stats", why="this service collects no usage statistics"),
    Alias("attention", why=OWN_KERNELS, flag=False),
    Alias("use_flash_attention", why=OWN_KERNELS, flag=False),
    Alias("prefix_caching", why="equal prefixes are always shared", flag=False),
    Alias("prefill_chunking", why=CHUNKED, flag=False),
    Alias("tgi_wiggle_room", why="the cache is counted in blocks, not estimated", flag=False),
    Alias("log_colorize", why="logs are plain text or JSON", flag=False),
)
REFUSED = (
    Alias("ngrok", why=NO_TUNNEL, refused=True, switch=True),
    Alias("ngrok_authtoken", why=NO_TUNNEL, refused=True),
    Alias("ngrok_edge", why=NO_TUNNEL, refused=True),
)
TGI_NAMES = MAPPED + WITHOUT_EFFECT + REFUSED
DEFAULTS = {
    "http_api": "tgi",
    "max_concurrent_requests": 128,
    "max_best_of": 2,
    "max_stop_sequences": 4,
    "max_top_n_tokens": 5,
    "max_client_batch_size": 4,
    "max_message_bytes": 2_000_000,
    "sharded": False,
    "shutdown_timeout": 90,
}
"""TGI's defaults for options that the operator does not set; `sharded` is this service's own choice."""


def join_repeated(arguments: Sequence[str], switches: Collection[str] = ()) -> list[str]:
    """Return the command line with a single flag, at its end, for all values of each flag in REPEATED."""
    words = list[str]()
    values = dict[str, list[str]]()
    rest = iter(arguments)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag not in REPEATED:
            words.append(word)
        elif (given := value if equals else next(rest, None)) is not None:
            values.setdefault(flag, []).append(given)
        else:
            words.append(word)  # the option itself refuses the missing value
    return words + [f"{flag}={','.join(given)}" for flag, given in values.items()]


OPTIONS = OptionNames(
    "tgi",
    "TGI",
    TGI_NAMES,
    "--model-id",
    DEFAULTS,
    rewrite=join_repeated,
    ambiguous_flags={"-g": "--grpc-port or --graceful-termination-timeout"},
)
