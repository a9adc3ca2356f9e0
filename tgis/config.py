"""Every option of the service, declared once. Only `tgis.cli` reads them, from the command line and the
environment; elsewhere a configuration is a frozen value."""

from dataclasses import dataclass

from tgis.declaration import option
from tgis.group_options import NodeOptions, RankOptions
from tgis.port_options import LinkOptions, PortOptions

DTYPES = ("float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
QUANTIZATIONS = ("int8", "gptq", "bitsandbytes")
FRAMEWORKS = (
    "hf_transformers",
    "hf_accelerate",
    "tgis_native",
    "hf_custom_tp",
    "hf_optimum_ort",
    "hf_optimum_bt",
    "ibm_fms",
    "ds_inference",
)
# What the names of engines mean that are still read: one of the three there are, or None for one of the first
# two, whichever serves the model.
ENGINES = {
    "tgis_native": "tgis_native",
    "hf_custom_tp": "tgis_native",
    "hf_transformers": "hf_transformers",
    "hf_accelerate": "hf_transformers",
    "hf_optimum_bt": None,
    "hf_optimum_ort": "hf_optimum_ort",
}
UDS_PATH = "/tmp/text-generation"  # of processes that are started by hand
SERVICE_NAME = "text-generation-inference.router"
SHORT_SEQUENCE = "max_sequence_length ({value}) must be at least 2 (1 input + 1 output)"
NO_SHARDS = "`num_shard` / NUM_GPUS cannot be < 1"


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    json_output: bool = option("Log JSON lines instead of text.", False)
    log_level: str = option(
        "Least severe level that is logged: debug, info, warning or error; tracing filters are read too.",
        "info",
    )


@dataclass(frozen=True, kw_only=True)
class FaultOptions:
    failpoints: str | None = option(
        "Faults to make happen, for tests: POINT[FACTS]=ACTION:SECONDS@TIME, with commas; unset: none.", None
    )


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    dtype: str | None = option(
        "Type the weights are held in; unset: the checkpoint's own.", None, choices=DTYPES
    )
    device: str = option(
        "What shards compute on; auto: GPUs where torch can use them, else the CPU.",
        "auto",
        env="TGIS_DEVICE",
        choices=DEVICES,
    )
    quantize: str | None = option(
        "Weights of linear layers in 8 bits, made when they are read: int8, on the CPU, in the service's own "
        "engine; activations are rounded to 8 bits where they meet them. gptq and bitsandbytes are refused.",
        None,
        choices=QUANTIZATIONS,
    )
    block_size: int = option("Tokens per cache block.", 16, minimum=1)
    kv_cache_tokens: int | None = option(
        "Most tokens the cache may hold; memory and the largest batch bound it too.", None, minimum=1
    )
    cpu_threads: int | None = option(
        "Threads each shard computes with; unset: the cores there are, shared by the shards.", None, minimum=1
    )
    deployment_framework: str | None = option(
        "Engine: tgis_native is the service's own and refuses families it does not know; hf_transformers "
        "runs transformers' code with the service's cache and attention, slower, where that can; "
        "hf_optimum_ort runs a model in ONNX form; unset: the service's own where it knows the family, "
        "transformers' code elsewhere.",
        None,
        choices=FRAMEWORKS,
    )
    trust_remote_code: bool = option(
        "Run Python code that comes with a checkpoint, with all the rights of this service.", False
    )


@dataclass(frozen=True, kw_only=True)
class TuningOptions:
    prefix_store_path: str | None = option(
        "Directory of tuned soft prompts, and of LoRA adapters, by their ids; unset: there are none.", None
    )
    prompt_cache_size_mb: int = option(
        "MiB of soft prompts that each shard may hold loaded; the least recently used make way.",
        512,
        minimum=1,
    )
    max_prompt_prefix_length: int | None = option(
        "Most virtual tokens of a soft prompt; unset: half of the longest sequence.", None, minimum=1
    )
    adapter_cache: str | None = option(
        "Directory of LoRA adapters by their ids, looked into before --prefix-store-path.", None
    )
    adapter_cache_size_mb: int = option(
        "MiB of LoRA adapters that each shard may hold loaded; the least recently used make way.",
        1024,
        minimum=1,
    )
    lora_adapters: str | None = option(
        "LoRA adapters to load at the start and keep: NAME=DIRECTORY, or ids in the hub cache, with commas.",
        None,
    )


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    max_sequence_length: int | None = option(
        "Limit of input plus output tokens; unset: what the model's configuration says.",
        None,
        minimum=2,
        refusal=SHORT_SEQUENCE,
    )
    max_batch_size: int = option("Most sequences in one step.", 256, minimum=1)
    max_step_tokens: int = option(
        "Most tokens computed in one step; longer prompts are computed in chunks.", 2048, minimum=1
    )


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
    )
    max_top_n_tokens: int = option("Upper bound of a request's top_n_tokens.", 10, minimum=1)
    tokenization_workers: int | None = option(
        "Threads that tokenize; calls with more than 32 KiB of text have a process of their own. Unset: 1 to "
        "8, by the cores.",
        None,
        minimum=1,
        refusal="tokenization_workers must be > 0",
    )
    output_special_tokens: bool = option("Keep special tokens in the text.", False)
    default_include_stop_seqs: bool = option(
        "Whether a stop sequence stays in the text where a request does not say.", True, takes_value=True
    )
    max_guided_bytes: int = option(
        "Bytes of the largest grammar, schema or list of choices that a request may bring.", 65536, minimum=1
    )
    steps_in_flight: int = option(
        "Unanswered steps; 1 waits for every answer before the next step is sent.", 2, minimum=1, maximum=8
    )
    speculate: int = option(
        "Most tokens of a sequence that a step computes ahead, guessed from what followed its newest tokens "
        "where they occurred before; outputs stay the same; 0: none.",
        0,
        minimum=0,
        maximum=16,
    )
    decode_step_ms: float = option(
        "Predicted time that a step may take while requests are decoding; prompts are cut to fit, and so "
        "that each gets no more of a step than those requests.",
        250.0,
        minimum=1,
    )
    shutdown_timeout: float = option(
        "Seconds that requests in flight get to finish on SIGTERM.", 30.0, minimum=0
    )
    recovery_timeout: float = option(
        "Seconds that requests wait for lost shards to come back.", 300.0, minimum=0
    )
    log_text_chars: int = option("Characters of input and output that a log line may show.", 0, minimum=0)
    otlp_endpoint: str | None = option(
        "OpenTelemetry collector (gRPC) that traces go to; unset: none are made.", None
    )
    otlp_service_name: str | None = option(
        f"Service name in traces; unset: OTEL_SERVICE_NAME, else {SERVICE_NAME}.", None
    )


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
    """`text-generation-launcher`."""

    model_name: str = option(
        "Directory of a model, or the id of one in the local hub cache.", "bigscience/bloom-560m"
    )
    revision: str | None = option("Revision of a model in the hub cache.", None)
    dtype_str: str | None = option("Older name of --dtype.", None, choices=DTYPES)
    num_shard: int | None = option(
        "Tensor-parallel shards of each node; unset: NUM_GPUS, else the visible devices, 1 on a CPU.",
        None,
        minimum=1,
        refusal=NO_SHARDS,
    )
    num_gpus: int | None = option(
        "Older name of --num-shard.",
        None,
        minimum=1,
        refusal=NO_SHARDS,
        unreadable="NUM_GPUS must be a positive integer",
    )
    shard_uds_path: str | None = option(
        "Prefix of the shards' Unix sockets; unset: inside a new private directory.", None
    )
    hf_hub_cache: str | None = option("Root of the hub cache.", None)
    hf_home: str | None = option("Parent of the hub cache where --hf-hub-cache is unset.", None)
    transformers_cache: str | None = option("Older name of HF_HUB_CACHE.", None, flag=False)
    huggingface_hub_cache: str | None = option("Older name of HF_HUB_CACHE.", None, flag=False)
    home: str | None = option(
        "The hub cache is .cache/huggingface/hub below it where nothing else is set.", None, flag=False
    )
    cuda_visible_devices: str | None = option(
        "On CUDA, its entries count the shards where no number is given.", None, flag=False
    )
    nvidia_visible_devices: str | None = option("Read where CUDA_VISIBLE_DEVICES is unset.", None, flag=False)
    termination_log: str = option(
        "File that gets the reason of a failure.", "/dev/termination-log", older_env="TERMINATION_LOG_DIR"
    )
    termination_grace_period: float | None = option(
        "Seconds from the pod's end to its being killed, its terminationGracePeriodSeconds; a "
        "--shutdown-timeout that does not fit into them is refused. Unset: nothing is checked.",
        None,
        minimum=0,
    )
    pre_stop_delay: float = option(
        "Seconds of the grace period that pass before SIGTERM comes, in the pod's preStop hook.",
        0.0,
        minimum=0,
    )
    compat: str | None = option("Also read the names of another server's options.", None, choices=("tgi",))
    env: bool = option(
        "Print versions, machine and settings to stderr first, then go on.", False, env=False, short="-e"
    )


@dataclass(frozen=True, kw_only=True)
class RouterConfig(LogOptions, FaultOptions, LinkOptions, BatchOptions, PortOptions, ServingOptions):
    """`text-generation-router`."""

    tokenizer_path: str = option("Directory that holds tokenizer.json.")
    shard_uds_path: str = option("Prefix of the shards' Unix sockets; the rank is appended.", UDS_PATH)
    shard_addresses: str | None = option(
        "HOST:PORT of each rank, with commas, or the path of a file that holds that and may change: TCP with "
        "mutual TLS instead of Unix sockets.",
        None,
        env=False,
    )
    num_shard: int = option("Shards of the group.", 1, minimum=1)
    max_sequence_length: int | None = option(
        "Limit of input plus output tokens.", 2048, minimum=2, refusal=SHORT_SEQUENCE
    )
    otlp_service_name: str | None = option("Service name in traces.", SERVICE_NAME, env="OTEL_SERVICE_NAME")


@dataclass(frozen=True, kw_only=True)
class ShardConfig(
    LogOptions, FaultOptions, LinkOptions, RankOptions, ModelOptions, TuningOptions, BatchOptions
):
    """`text-generation-server serve`: one rank of a group."""

    model_path: str = option("Directory of the model; MODEL_NAME may be given instead.")
    tokenizer_path: str | None = option(
        "Directory that holds tokenizer.json; unset: the model's.", None, env=False
    )
    uds_path: str = option("Prefix of the Unix sockets; the rank is appended.", UDS_PATH)
    listen_address: str | None = option(
        "HOST:PORT: TCP with mutual TLS instead of Unix sockets; steps have the next port.", None, env=False
    )
    kernel_cache: str | None = option(
        "Directory for compiled code where no other place can be written.", None, env=False
    )
    heartbeat_fd: int | None = option(
        "Open file descriptor to write signs of life to.", None, env=False, minimum=0
    )
