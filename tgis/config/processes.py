"""Declares the configuration classes of the launcher, the router and the shards.

Only `tgis.cli` reads the options, from the command line and the environment. Elsewhere a configuration is a
frozen value."""

from dataclasses import dataclass

from tgis.config.cluster import NodeOptions, RankOptions
from tgis.config.model import DTYPES, ModelOptions, TuningOptions
from tgis.config.network import LinkOptions, PortOptions
from tgis.config.option import Group, in_group, option

# Engine for each accepted name. There are three engines: tgis_native, hf_transformers and hf_optimum_ort.
# None means tgis_native or hf_transformers, whichever serves the model.
ENGINES = {
    "tgis_native": "tgis_native",
    "hf_custom_tp": "tgis_native",
    "hf_transformers": "hf_transformers",
    "hf_accelerate": "hf_transformers",
    "hf_optimum_bt": None,
    "hf_optimum_ort": "hf_optimum_ort",
}
UDS_PATH = "/tmp/text-generation"  # default for processes that are started by hand
SERVICE_NAME = "text-generation-inference.router"
SHORT_SEQUENCE = "max_sequence_length ({value}) must be at least 2 (1 input + 1 output)"
NO_SHARDS = "`num_shard` / NUM_GPUS cannot be < 1"


@in_group(Group.LOGS)
@dataclass(frozen=True, kw_only=True)
class LogOptions:
    json_output: bool = option("Log JSON lines instead of text.", False)
    log_level: str = option(
        "Least severe level that is logged: debug, info, warning or error; tracing filters are read too.",
        "info",
    )


@in_group(Group.LIFECYCLE)
@dataclass(frozen=True, kw_only=True)
class FaultOptions:
    failpoints: str | None = option(
        "Faults to make happen, for tests: POINT[FACTS]=ACTION:SECONDS@TIME, with commas; unset: none.", None
    )


@in_group(Group.MEMORY)
@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    max_sequence_length: int | None = option(
        "Limit of input plus output tokens; unset: what the model's configuration says.",
        None,
        minimum=2,
        refusal=SHORT_SEQUENCE,
        group=Group.LIMITS,
        is_common=True,
    )
    max_batch_size: int = option("Most sequences in one step.", 256, minimum=1, is_common=True)
    max_step_tokens: int = option(
        "Most tokens computed in one step; longer prompts are computed in chunks.", 2048, minimum=1
    )


@in_group(Group.LIMITS)
@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    max_concurrent_requests: int = option(
        "Most inputs in the server at once.", 512, minimum=1, refusal="max_concurrent_requests must be > 0"
    )
    max_new_tokens: int = option(
        "Upper bound of a request's max_new_tokens.",
        1024,
        minimum=1,
        refusal="max_new_tokens ({value}) at least 1",
        is_common=True,
    )
    max_top_n_tokens: int = option("Upper bound of a request's top_n_tokens.", 10, minimum=1)
    tokenization_workers: int | None = option(
        "Threads that tokenize; calls with more than 32 KiB of text have a process of their own. Unset: 1 to "
        "8, by the cores.",
        None,
        minimum=1,
        refusal="tokenization_workers must be > 0",
        group=Group.MEMORY,
    )
    output_special_tokens: bool = option("Keep special tokens in the text.", False)
    default_include_stop_seqs: bool = option(
        "Whether a stop sequence stays in the text where a request does not say.", True, takes_value=True
    )
    max_guided_bytes: int = option(
        "Bytes of the largest grammar, schema or list of choices that a request may bring.", 65536, minimum=1
    )
    steps_in_flight: int = option(
        "Unanswered steps; 1 waits for every answer before the next step is sent.",
        2,
        minimum=1,
        maximum=8,
        group=Group.MEMORY,
    )
    speculate: int = option(
        "Most tokens of a sequence that a step computes ahead, guessed from what followed its newest tokens "
        "where they occurred before; outputs stay the same; 0: none.",
        0,
        minimum=0,
        maximum=16,
        group=Group.MEMORY,
    )
    decode_step_ms: float = option(
        "Predicted time that a step may take while requests are decoding; prompts are cut to fit, and so "
        "that each gets no more of a step than those requests.",
        250.0,
        minimum=1,
        group=Group.MEMORY,
    )
    shutdown_timeout: float = option(
        "Seconds that requests in flight get to finish on SIGTERM.", 30.0, minimum=0, group=Group.LIFECYCLE
    )
    recovery_timeout: float = option(
        "Seconds that requests wait for lost shards to come back.", 300.0, minimum=0, group=Group.LIFECYCLE
    )
    log_text_chars: int = option(
        "Characters of input and output that a log line may show.", 0, minimum=0, group=Group.LOGS
    )
    otlp_endpoint: str | None = option(
        "OpenTelemetry collector (gRPC) that traces go to; unset: none are made.", None, group=Group.LOGS
    )
    otlp_service_name: str | None = option(
        f"Service name in traces; unset: OTEL_SERVICE_NAME, else {SERVICE_NAME}.", None, group=Group.LOGS
    )


@in_group(Group.MODEL)
@dataclass(frozen=True, kw_only=True)
class LauncherConfig(
    LogOptions,
    FaultOptions,
    NodeOptions,
    LinkOptions,
    ModelOptions,
    TuningOptions,
    BatchOptions,
    PortOptions,
    ServingOptions,
):
    """Options of `text-generation-launcher`."""

    model_name: str = option(
        "Directory of a model, or the id of one in the local hub cache.",
        "bigscience/bloom-560m",
        is_common=True,
    )
    revision: str | None = option("Revision of a model in the hub cache.", None, is_common=True)
    dtype_str: str | None = option("Older name of --dtype.", None, choices=DTYPES, group=Group.COMPATIBILITY)
    num_shard: int | None = option(
        "Tensor-parallel shards of each node; unset: NUM_GPUS, else on GPUs the number of entries in "
        "CUDA_VISIBLE_DEVICES, or in NVIDIA_VISIBLE_DEVICES where that is unset, else 1. GPUs themselves are "
        "not counted.",
        None,
        minimum=1,
        refusal=NO_SHARDS,
        is_common=True,
    )
    num_gpus: int | None = option(
        "Older name of --num-shard.",
        None,
        minimum=1,
        refusal=NO_SHARDS,
        unreadable="NUM_GPUS must be a positive integer",
        group=Group.COMPATIBILITY,
    )
    shard_uds_path: str | None = option(
        "Prefix of the shards' Unix sockets; unset: inside a new private directory.",
        None,
        group=Group.NETWORK,
    )
    hf_hub_cache: str | None = option("Root of the hub cache.", None)
    hf_home: str | None = option("Parent of the hub cache where --hf-hub-cache is unset.", None)
    transformers_cache: str | None = option(
        "Older name of HF_HUB_CACHE.", None, flag=False, group=Group.COMPATIBILITY
    )
    huggingface_hub_cache: str | None = option(
        "Older name of HF_HUB_CACHE.", None, flag=False, group=Group.COMPATIBILITY
    )
    home: str | None = option(
        "The hub cache is .cache/huggingface/hub below it where nothing else is set.", None, flag=False
    )
    cuda_visible_devices: str | None = option(
        "On CUDA, its entries count the shards where no number is given.", None, flag=False
    )
    nvidia_visible_devices: str | None = option("Read where CUDA_VISIBLE_DEVICES is unset.", None, flag=False)
    termination_log: str = option(
        "File that gets the reason of a failure.",
        "/dev/termination-log",
        older_env="TERMINATION_LOG_DIR",
        group=Group.LIFECYCLE,
    )
    termination_grace_period: float | None = option(
        "Seconds from the pod's end to its being killed, its terminationGracePeriodSeconds; a "
        "--shutdown-timeout that does not fit into them is refused. Unset: nothing is checked.",
        None,
        minimum=0,
        group=Group.LIFECYCLE,
    )
    pre_stop_delay: float = option(
        "Seconds of the grace period that pass before SIGTERM comes, in the pod's preStop hook.",
        0.0,
        minimum=0,
        group=Group.LIFECYCLE,
    )
    compat: str | None = option(
        "Also read the names of another server's options.", None, choices=("tgi",), group=Group.COMPATIBILITY
    )
    env: bool = option(
        "Print versions, machine and settings to stderr first, then go on.",
        False,
        env=False,
        short="-e",
        group=Group.LOGS,
    )


@in_group(Group.MODEL)
@dataclass(frozen=True, kw_only=True)
class RouterConfig(LogOptions, FaultOptions, LinkOptions, BatchOptions, PortOptions, ServingOptions):
    """Options of `text-generation-router`."""

    tokenizer_path: str = option("Directory that holds tokenizer.json.", is_common=True)
    shard_uds_path: str = option(
        "Prefix of the shards' Unix sockets; the rank is appended.", UDS_PATH, group=Group.NETWORK
    )
    shard_addresses: str | None = option(
        "HOST:PORT of each rank, with commas, or the path of a file that holds that and may change: TCP with "
        "mutual TLS instead of Unix sockets.",
        None,
        env=False,
        group=Group.NETWORK,
    )
    num_shard: int = option("Shards of the group.", 1, minimum=1, is_common=True)
    max_sequence_length: int | None = option(
        "Limit of input plus output tokens.",
        2048,
        minimum=2,
        refusal=SHORT_SEQUENCE,
        group=Group.LIMITS,
        is_common=True,
    )
    otlp_service_name: str | None = option(
        "Service name in traces.", SERVICE_NAME, env="OTEL_SERVICE_NAME", group=Group.LOGS
    )


@in_group(Group.MODEL)
@dataclass(frozen=True, kw_only=True)
class ShardConfig(
    LogOptions, FaultOptions, LinkOptions, RankOptions, ModelOptions, TuningOptions, BatchOptions
):
    """Options of `text-generation-server serve`, which runs one rank of a shard group."""

    model_path: str = option("Directory of the model; MODEL_NAME may be given instead.", is_common=True)
    tokenizer_path: str | None = option(
        "Directory that holds tokenizer.json; unset: the model's.", None, env=False, is_common=True
    )
    uds_path: str = option("Prefix of the Unix sockets; the rank is appended.", UDS_PATH, group=Group.NETWORK)
    listen_address: str | None = option(
        "HOST:PORT: TCP with mutual TLS instead of Unix sockets; steps have the next port.",
        None,
        env=False,
        group=Group.NETWORK,
    )
    kernel_cache: str | None = option(
        "Directory for compiled code where no other place can be written.",
        None,
        env=False,
        group=Group.LIFECYCLE,
    )
    heartbeat_fd: int | None = option(
        "Open file descriptor to write signs of life to.", None, env=False, minimum=0, group=Group.LIFECYCLE
    )
