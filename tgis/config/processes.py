"""Declares the configurations of launcher, router and shards, which only `tgis.cli` reads from outside."""

from dataclasses import dataclass

from tgis.config.cluster import NodeOptions, RankOptions
from tgis.config.model import DTYPES, AdapterOptions, ModelOptions
from tgis.config.network import LinkOptions, PortOptions
from tgis.config.option import Group, Secret, in_group, option
from tgis.config.serving import SERVICE_NAME, SHORT_SEQUENCE, BatchOptions, ServingOptions

UDS_PATH = "/tmp/text-generation"  # default for processes that are started by hand
SHARED_AGE_S = 600.0  # age of connections to one of several workers
COMPAT = ("tgi", "vllm", "lmi")
"""Servers whose option names `--compat` reads. If several have a flag, the first one's declares it."""
MAX_SHARDS = 1024  # each is a process
NO_SHARDS = "`num_shard` / NUM_GPUS cannot be < 1"


@in_group(Group.LOGS)
@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    json_output: bool = option("Log JSON lines instead of text.", False)
    log_level: str = option(
        "Least severe level that is logged: debug, info, warning or error; tracing filters are read too.",
        "info",
    )
    failpoints: str | None = option(
        "Faults to inject, for tests: POINT[FACTS]=ACTION:SECONDS@TIME, separated by commas; unset: none.",
        None,
        group=Group.LIFECYCLE,
    )


@in_group(Group.LIFECYCLE)
@dataclass(frozen=True, kw_only=True)
class HeartbeatOptions:
    heartbeat_fd: int | None = option(
        "Open file descriptor to write heartbeats to.", None, env=False, minimum=0
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
        "Directory of a model, or the id of one in the local hub cache.",
        "bigscience/bloom-560m",
        is_common=True,
    )
    revision: str | None = option("Revision of a model in the hub cache.", None, is_common=True)
    tokenizer_name: str | None = option(
        "Directory of another tokenizer, or the id of a model in the local hub cache that has it; unset: the "
        "model's own.",
        None,
    )
    sharded: bool | None = option(
        "If no number of shards is given: true takes all GPUs that are counted, and there must be several; "
        "false takes one shard.",
        None,
        takes_value=True,
        group=Group.COMPATIBILITY,
    )
    dtype_str: str | None = option("Older name of --dtype.", None, choices=DTYPES, group=Group.COMPATIBILITY)
    num_shard: int | None = option(
        "Tensor-parallel shards of each node; unset: NUM_GPUS, else on GPUs the number of entries in "
        "CUDA_VISIBLE_DEVICES, or in NVIDIA_VISIBLE_DEVICES if that is unset, else 1. GPUs themselves are "
        "not counted.",
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
        "Prefix of the shards' Unix sockets; unset: inside a new private directory.",
        None,
        group=Group.NETWORK,
    )
    hf_hub_cache: str | None = option("Root of the hub cache.", None)
    hf_home: str | None = option("Parent of the hub cache if --hf-hub-cache is unset.", None)
    transformers_cache: str | None = option(
        "Older name of HF_HUB_CACHE.", None, flag=False, group=Group.COMPATIBILITY
    )
    huggingface_hub_cache: str | None = option(
        "Older name of HF_HUB_CACHE.", None, flag=False, group=Group.COMPATIBILITY
    )
    home: str | None = option(
        "The hub cache is .cache/huggingface/hub below it if nothing else is set.", None, flag=False
    )
    hf_token: Secret | None = option(
        "Token of the hub for what is downloaded at the start, which is done under --compat only.",
        None,
        older_env="HUGGING_FACE_HUB_TOKEN",
        flag=False,
    )
    hf_endpoint: str | None = option("Address of the hub for that; unset: Hugging Face's.", None, flag=False)
    hf_hub_offline: str | None = option(
        "1, true, yes or on: nothing is downloaded at the start.", None, flag=False
    )
    transformers_offline: str | None = option("Older name of HF_HUB_OFFLINE.", None, flag=False)
    cuda_visible_devices: str | None = option(
        "On GPUs, the number of its entries is the number of shards if none is given.", None, flag=False
    )
    nvidia_visible_devices: str | None = option("Read where CUDA_VISIBLE_DEVICES is unset.", None, flag=False)
    termination_log: str = option(
        "File that the reason of a failure is written to.",
        "/dev/termination-log",
        older_env="TERMINATION_LOG_DIR",
        group=Group.LIFECYCLE,
    )
    termination_grace_period: float | None = option(
        "The pod's terminationGracePeriodSeconds, from its end until it is killed; a --shutdown-timeout that "
        "does not fit is refused. Unset: nothing is checked.",
        None,
        minimum=0,
        group=Group.LIFECYCLE,
    )
    pre_stop_delay: float = option(
        "Seconds of the grace period that the pod's preStop hook takes before SIGTERM.",
        0.0,
        minimum=0,
        group=Group.LIFECYCLE,
    )
    auth_tokens: Secret | None = option(
        "Bearer tokens as in --auth-tokens-path, a line each, instead of that file.",
        None,
        flag=False,
        group=Group.TLS,
    )
    compat: str | None = option(
        "Also read the names of another server's options.", None, choices=COMPAT, group=Group.COMPATIBILITY
    )
    properties: str | None = option(
        "With --compat lmi, the serving.properties file to read; unset: that of option.model_dir or else of "
        "/opt/ml/model, if there is one.",
        None,
        group=Group.COMPATIBILITY,
    )
    strict_config: bool = option(
        "With --compat lmi, refuse unknown option names instead of warning about them.",
        False,
        group=Group.COMPATIBILITY,
    )
    router_workers: int | None = option(
        "Processes that serve the public ports beside one engine process; 1: one process does both. Unset: 1 "
        "on up to four cores, else a quarter of the cores, at most 8.",
        None,
        minimum=1,
        maximum=64,
        group=Group.MEMORY,
    )
    startup_timeout: float | None = option(
        "Seconds within which all shards must have loaded the model at the start; later the launcher stops "
        "everything and exits with 1. Unset: no limit.",
        None,
        minimum=0.1,
        group=Group.LIFECYCLE,
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
class RouterConfig(ProcessOptions, HeartbeatOptions, LinkOptions, BatchOptions, PortOptions, ServingOptions):
    tokenizer_path: str = option("Directory that holds tokenizer.json.", is_common=True)
    shard_uds_path: str = option(
        "Prefix of the shards' Unix sockets; the rank is appended.", UDS_PATH, group=Group.NETWORK
    )
    shard_addresses: str | None = option(
        "HOST:PORT of each rank, separated by commas, or the path of a file that holds them and may change: "
        "TCP with mutual TLS instead of Unix sockets.",
        None,
        env=False,
        group=Group.NETWORK,
    )
    adapter_roots: str | None = option(
        "Directories of LoRA adapters, separated by colons, in the order in which shards search them; with "
        "--runtime-adapters, clients may then give an adapter's path.",
        None,
        env=False,
        group=Group.ADAPTERS,
    )
    num_shard: int = option("Shards of the group.", 1, minimum=1, maximum=MAX_SHARDS, is_common=True)
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
    engine_path: str | None = option(
        "Unix socket of the engine process; unset: the engine runs in this process.",
        None,
        env=False,
        group=Group.NETWORK,
    )
    router_workers: int = option(
        "Router processes that share the public ports and the engine process.",
        1,
        env=False,
        minimum=1,
        group=Group.MEMORY,
    )
    worker: int = option("Number of this router process, from 0.", 0, env=False, minimum=0, group=Group.LOGS)
    metrics_dir: str | None = option(
        "Directory of the files in which all processes of the router keep their metrics; unset: in memory.",
        None,
        env=False,
        group=Group.LOGS,
    )
    model_sampling_path: str | None = option(
        "The model's generation_config.json, which --generation-config auto reads; unset: none.",
        None,
        env=False,
        group=Group.MODEL,
    )
    http_url_path: str | None = option(
        "File that the URL of the HTTP port is written to, for `tgis top` on this machine; unset: none.",
        None,
        env=False,
        group=Group.NETWORK,
    )

    @property
    def shares_ports(self) -> bool:
        """True if other workers of the same router listen on the same public ports."""
        return self.router_workers > 1

    @property
    def connection_age(self) -> float | None:
        """Seconds after which clients' connections end. A connection stays with the worker that accepted it,
        so with several workers connections are spread anew from time to time. None: never."""
        default = SHARED_AGE_S if self.shares_ports else None
        return default if self.max_connection_age is None else self.max_connection_age


@in_group(Group.MODEL)
@dataclass(frozen=True, kw_only=True)
class ShardConfig(
    ProcessOptions, HeartbeatOptions, LinkOptions, RankOptions, ModelOptions, AdapterOptions, BatchOptions
):
    model_path: str = option("Directory of the model; MODEL_NAME may be given instead.", is_common=True)
    tokenizer_path: str | None = option(
        "Directory that holds tokenizer.json; unset: the model's.", None, env=False, is_common=True
    )
    uds_path: str = option("Prefix of the Unix sockets; the rank is appended.", UDS_PATH, group=Group.NETWORK)
    listen_address: str | None = option(
        "HOST:PORT: TCP with mutual TLS instead of Unix sockets; steps use the next port.",
        None,
        env=False,
        group=Group.NETWORK,
    )
    kernel_cache: str | None = option(
        "Directory for compiled code if no other place can be written.",
        None,
        env=False,
        group=Group.LIFECYCLE,
    )
