"""Declares the configurations of launcher, router and shards. Only `tgis.cli` parses flags and variables."""

from dataclasses import dataclass

from tgis.config.cluster import NodeOptions, RankOptions
from tgis.config.model import DTYPES, AdapterOptions, ModelOptions
from tgis.config.network import LinkOptions, PortOptions
from tgis.config.option import Group, Secret, in_group, option
from tgis.config.serving import SERVICE_NAME, SHORT_SEQUENCE, BatchOptions, ServingOptions

UDS_PATH = "/tmp/text-generation"  # default for processes that are started manually
SHARED_AGE_S = 600.0  # maximum age of connections if there are several router workers
COMPAT = ("tgi", "vllm", "lmi")
"""Servers whose option names `--compat` reads. If several have a flag, the first one's declares it."""
MAX_SHARDS = 1024  # each is a process
NO_SHARDS = "`num_shard` / NUM_GPUS cannot be < 1"


@in_group(Group.LOGS)
@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    json_output: bool = option("Log JSON lines instead of text.", False)
    log_level: str = option(
        "Minimum severity of logged lines: debug, info, warning or error; filters in the syntax of Rust's "
        "tracing are accepted too.",
        "info",
    )
    failpoints: str | None = option(
        "Faults to inject for tests: POINT[FACTS]=ACTION:SECONDS@TIME, separated by commas; unset: none.",
        None,
        group=Group.LIFECYCLE,
    )


@in_group(Group.LIFECYCLE)
@dataclass(frozen=True, kw_only=True)
class HeartbeatOptions:
    heartbeat_fd: int | None = option(
        "Open file descriptor to which heartbeats are written.", None, env=False, minimum=0
    )


@in_group(Group.MODEL)
@dataclass(frozen=True, kw_only=True)
class LauncherConfig(
    ProcessOptions,
    NodeOptions,
    LinkOptions,
    ModelOptions,
    AdapterOptions,
    BatchOptions,
    PortOptions,
    ServingOptions,
):
    model_name: str = option(
        "Model: a directory, a GGUF file, or the id of a model in the local hub cache.",
        "bigscience/bloom-560m",
        is_common=True,
    )
    revision: str | None = option("Revision of a model in the hub cache; unset: main.", None, is_common=True)
    tokenizer_name: str | None = option(
        "Tokenizer: a directory, or the id of a model in the local hub cache; unset: the model's own.",
        None,
    )
    sharded: bool | None = option(
        "Number of shards if --num-shard and NUM_GPUS are unset: true uses all visible GPUs and needs at "
        "least two; false uses one shard.",
        None,
        takes_value=True,
        group=Group.COMPATIBILITY,
    )
    dtype_str: str | None = option("Older name of --dtype.", None, choices=DTYPES, group=Group.COMPATIBILITY)
    num_shard: int | None = option(
        "Number of tensor-parallel shards per node; unset: NUM_GPUS, else on GPUs the number of entries in "
        "CUDA_VISIBLE_DEVICES or, if that is unset, NVIDIA_VISIBLE_DEVICES, else 1. GPUs themselves are not "
        "counted.",
        None,
        minimum=1,
        maximum=MAX_SHARDS,
        refusal=NO_SHARDS,
        is_common=True,
    )
    num_gpus: int | None = option(
        "Older name of --num-shard.",
        None,
        minimum=1,
        maximum=MAX_SHARDS,
        refusal=NO_SHARDS,
        unreadable="NUM_GPUS must be a positive integer",
        group=Group.COMPATIBILITY,
    )
    shard_uds_path: str | None = option(
        "Path prefix of the shards' Unix sockets; unset: in a new private directory.",
        None,
        group=Group.NETWORK,
    )
    hf_hub_cache: str | None = option("Directory of the hub cache.", None)
    hf_home: str | None = option(
        "Directory whose folder hub is the hub cache if --hf-hub-cache is unset.", None
    )
    transformers_cache: str | None = option(
        "Older name of HF_HUB_CACHE.", None, flag=False, group=Group.COMPATIBILITY
    )
    huggingface_hub_cache: str | None = option(
        "Older name of HF_HUB_CACHE.", None, flag=False, group=Group.COMPATIBILITY
    )
    home: str | None = option(
        "Home directory; the hub cache is its folder .cache/huggingface/hub if no other variable sets it.",
        None,
        flag=False,
    )
    hf_token: Secret | None = option(
        "Access token of the hub for downloads at start-up, which only --compat makes; unset: none.",
        None,
        older_env="HUGGING_FACE_HUB_TOKEN",
        flag=False,
    )
    hf_endpoint: str | None = option(
        "URL of the hub for downloads at start-up; unset: Hugging Face's hub.", None, flag=False
    )
    hf_hub_offline: str | None = option("1, true, yes or on: download nothing at start-up.", None, flag=False)
    transformers_offline: str | None = option("Older name of HF_HUB_OFFLINE.", None, flag=False)
    cuda_visible_devices: str | None = option(
        "Visible GPUs; the number of its entries is the default of --num-shard on GPUs.", None, flag=False
    )
    nvidia_visible_devices: str | None = option(
        "Visible GPUs if CUDA_VISIBLE_DEVICES is unset.", None, flag=False
    )
    termination_log: str = option(
        "File to which the reason of a failure is written.",
        "/dev/termination-log",
        older_env="TERMINATION_LOG_DIR",
        group=Group.LIFECYCLE,
    )
    termination_grace_period: float | None = option(
        "The pod's terminationGracePeriodSeconds; a --shutdown-timeout that does not fit into it is refused. "
        "Unset: not checked.",
        None,
        minimum=0,
        group=Group.LIFECYCLE,
    )
    pre_stop_delay: float = option(
        "Seconds of the grace period that the pod's preStop hook uses before SIGTERM.",
        0.0,
        minimum=0,
        group=Group.LIFECYCLE,
    )
    auth_tokens: Secret | None = option(
        "Bearer tokens, one per line as in the file of --auth-tokens-path, which it replaces.",
        None,
        flag=False,
        group=Group.TLS,
    )
    compat: str | None = option(
        "Also accept the option names of another server; unset: only this service's and TGIS's names.",
        None,
        choices=COMPAT,
        group=Group.COMPATIBILITY,
    )
    properties: str | None = option(
        "With --compat lmi, the serving.properties file to read; unset: the one in option.model_dir, else in "
        "/opt/ml/model, if it exists.",
        None,
        group=Group.COMPATIBILITY,
    )
    strict_config: bool = option(
        "With --compat lmi, refuse unknown option names instead of warning about them.",
        False,
        group=Group.COMPATIBILITY,
    )
    router_workers: int | None = option(
        "Number of processes that serve the public ports, besides one engine process; 1: one process does "
        "both. Unset: 1 on up to four cores, else a quarter of the cores, up to 8.",
        None,
        minimum=1,
        maximum=64,
        group=Group.MEMORY,
    )
    startup_timeout: float | None = option(
        "Maximum time, in seconds, until all shards have loaded the model at start-up; after it, the "
        "launcher stops the service and exits with 1. Unset: no limit.",
        None,
        minimum=0.1,
        group=Group.LIFECYCLE,
    )
    env: bool = option(
        "Print versions, machine and settings to stderr before the service starts.",
        False,
        env=False,
        short="-e",
        group=Group.LOGS,
    )


@in_group(Group.MODEL)
@dataclass(frozen=True, kw_only=True)
class RouterConfig(ProcessOptions, HeartbeatOptions, LinkOptions, BatchOptions, PortOptions, ServingOptions):
    tokenizer_path: str = option("Directory that contains tokenizer.json.", is_common=True)
    shard_uds_path: str = option(
        "Path prefix of the shards' Unix sockets; the rank is appended.", UDS_PATH, group=Group.NETWORK
    )
    shard_addresses: str | None = option(
        "HOST:PORT of each rank, separated by commas, or the path of a file that contains them and may "
        "change, for TCP with mutual TLS; unset: Unix sockets.",
        None,
        env=False,
        group=Group.NETWORK,
    )
    adapter_roots: str | None = option(
        "Directories of LoRA adapters, separated by colons, in the order in which shards search them; if "
        "set, clients may name an adapter by its path with --runtime-adapters.",
        None,
        env=False,
        group=Group.ADAPTERS,
    )
    num_shard: int = option(
        "Number of shards in the group.", 1, minimum=1, maximum=MAX_SHARDS, is_common=True
    )
    max_sequence_length: int | None = option(
        "Maximum number of input plus output tokens of a sequence.",
        2048,
        minimum=2,
        refusal=SHORT_SEQUENCE,
        group=Group.LIMITS,
        is_common=True,
    )
    otlp_service_name: str | None = option(
        "Service name in traces.", SERVICE_NAME, env="OTEL_SERVICE_NAME", group=Group.LOGS
    )
    engine_path: str | None = option(
        "Path of the engine process's Unix socket; unset: the engine runs in this process.",
        None,
        env=False,
        group=Group.NETWORK,
    )
    router_workers: int = option(
        "Number of router processes that share the public ports and the engine process.",
        1,
        env=False,
        minimum=1,
        group=Group.MEMORY,
    )
    worker: int = option("Index of this router process, from 0.", 0, env=False, minimum=0, group=Group.LOGS)
    metrics_dir: str | None = option(
        "Directory of the metric files that the router's processes share; unset: metrics stay in memory.",
        None,
        env=False,
        group=Group.LOGS,
    )
    model_sampling_path: str | None = option(
        "Path of the model's generation_config.json, for --generation-config auto; unset: none.",
        None,
        env=False,
        group=Group.MODEL,
    )
    http_url_path: str | None = option(
        "File to which the URL of the HTTP port is written, for `tgis top` on this machine; unset: none.",
        None,
        env=False,
        group=Group.NETWORK,
    )
    ready_text: str | None = option(
        "Text, such as examples of calls, to print to stderr when the service begins to serve; not printed "
        "with --json-output. Unset: none.",
        None,
        flag=False,
        group=Group.LOGS,
    )

    @property
    def shares_ports(self) -> bool:
        """True if other workers of the same router listen on the same public ports."""
        return self.router_workers > 1

    @property
    def connection_age(self) -> float | None:
        """Maximum age of clients' connections, in seconds; None: no limit.

        A connection stays with the worker that accepted it; the limit keeps several workers balanced."""
        default = SHARED_AGE_S if self.shares_ports else None
        return default if self.max_connection_age is None else self.max_connection_age


@in_group(Group.MODEL)
@dataclass(frozen=True, kw_only=True)
class ShardConfig(
    ProcessOptions, HeartbeatOptions, LinkOptions, RankOptions, ModelOptions, AdapterOptions, BatchOptions
):
    model_path: str = option("Directory of the model; MODEL_NAME may be set instead.", is_common=True)
    tokenizer_path: str | None = option(
        "Directory that contains tokenizer.json; unset: the model's directory.",
        None,
        env=False,
        is_common=True,
    )
    uds_path: str = option(
        "Path prefix of the shards' Unix sockets; the rank is appended.", UDS_PATH, group=Group.NETWORK
    )
    listen_address: str | None = option(
        "HOST:PORT on which to listen, with mutual TLS; steps use the next port; unset: Unix sockets.",
        None,
        env=False,
        group=Group.NETWORK,
    )
    kernel_cache: str | None = option(
        "Directory of the run, for compiled kernels if no other directory is writable, and for the choice of "
        "products on GPUs; unset: none.",
        None,
        env=False,
        group=Group.LIFECYCLE,
    )
    options_fd: int | None = option(
        "Open file descriptor of a socket; the process imports its libraries, receives all options from the "
        "launcher, and then loads the model. Unset: the options are those of the command line.",
        None,
        env=False,
        minimum=0,
        group=Group.LIFECYCLE,
    )
