"""Every option of the service, declared once: field, flag, environment variable, type, range and help follow
from it. Only `tgis.cli` reads them, from the command line and the environment; elsewhere a configuration is a
frozen value."""

from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, get_type_hints

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Option:
    """What the command line needs to know of a field beside its name and type."""

    help: str
    env: bool = True
    """Whether the variable named after the field is read."""
    short: str | None = None
    choices: tuple[str, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None
    takes_value: bool = False
    """A boolean that is written `--flag true`, as TGIS wants it for one of its flags."""


def option(help: str, default: Any = MISSING, **more: Any) -> Any:
    """A field that is an option; `more` are further fields of Option."""
    return field(default=default, metadata={"option": Option(help, **more)})


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    json_output: bool = option("Log JSON lines instead of text.", False)
    log_level: str = option(
        "Least severe level that is logged.", "info", choices=("debug", "info", "warning", "error")
    )


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    dtype: str | None = option(
        "Type the weights are held in; unset: the checkpoint's own.", None, choices=DTYPES
    )
    block_size: int = option("Tokens per cache block.", 16, minimum=1)
    kv_cache_tokens: int | None = option(
        "Most tokens the cache may hold; memory and the largest batch bound it too.", None, minimum=1
    )
    cpu_threads: int | None = option(
        "Threads each shard computes with; unset: the cores there are, shared by the shards.", None, minimum=1
    )


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    max_sequence_length: int | None = option(
        "Limit of input plus output tokens; unset: what the model's configuration says.", None, minimum=2
    )
    max_batch_size: int = option("Most sequences in one step.", 256, minimum=1)
    max_step_tokens: int = option(
        "Most tokens computed in one step; longer prompts are computed in chunks.", 2048, minimum=1
    )


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    max_concurrent_requests: int = option("Most inputs in the server at once.", 512, minimum=1)
    max_new_tokens: int = option("Upper bound of a request's max_new_tokens.", 1024, minimum=1)
    bind: str = option("Address the public ports listen on.", "0.0.0.0")
    port: int = option(
        "HTTP port: health and metrics; 0 takes a free one.", 3000, short="-p", minimum=0, maximum=65535
    )
    grpc_port: int = option(
        "Public gRPC port; 0 takes a free one.", 8033, short="-g", minimum=0, maximum=65535
    )
    tokenization_workers: int | None = option(
        "Threads that tokenize; unset: 1 to 8 by the cores.", None, minimum=1
    )
    output_special_tokens: bool = option("Keep special tokens in the text.", False)
    default_include_stop_seqs: bool = option(
        "Whether a stop sequence stays in the text where a request does not say.", True, takes_value=True
    )
    steps_in_flight: int = option(
        "Unanswered steps; 1 waits for every answer before the next step is sent.", 2, minimum=1, maximum=8
    )
    decode_step_ms: float = option(
        "Predicted time that a step may take while requests are decoding; prompts are cut to fit.",
        250.0,
        minimum=1,
    )
    shutdown_timeout: float = option(
        "Seconds that requests in flight get to finish on SIGTERM.", 30.0, minimum=0
    )
    recovery_timeout: float = option(
        "Seconds that requests wait for lost shards to come back.", 300.0, minimum=0
    )


@dataclass(frozen=True, kw_only=True)
class LauncherConfig(LogOptions, ModelOptions, BatchOptions, ServingOptions):
    """`text-generation-launcher`."""

    model_name: str = option(
        "Directory of a model, or the id of one in the local hub cache.", "bigscience/bloom-560m"
    )
    revision: str | None = option("Revision of a model in the hub cache.", None)
    dtype_str: str | None = option("Older name of --dtype.", None, choices=DTYPES)
    num_shard: int | None = option("Tensor-parallel shards; unset: NUM_GPUS, else 1.", None, minimum=1)
    num_gpus: int | None = option("Older name of --num-shard.", None, minimum=1)
    shard_uds_path: str | None = option(
        "Prefix of the shards' Unix sockets; unset: inside a new private directory.", None
    )
    hf_hub_cache: str | None = option("Root of the hub cache.", None)
    hf_home: str | None = option("Parent of the hub cache where --hf-hub-cache is unset.", None)
    termination_log: str = option("File that gets the reason of a failure.", "/dev/termination-log")


@dataclass(frozen=True, kw_only=True)
class RouterConfig(LogOptions, BatchOptions, ServingOptions):
    """`text-generation-router`."""

    tokenizer_path: str = option("Directory that holds tokenizer.json.")
    shard_uds_path: str = option("Prefix of the shards' Unix sockets; the rank is appended.")
    num_shard: int = option("Shards of the group.", 1, minimum=1)


@dataclass(frozen=True, kw_only=True)
class ShardConfig(LogOptions, ModelOptions, BatchOptions):
    """`text-generation-server serve`: one rank of a group."""

    model_path: str = option("Directory of the model.")
    uds_path: str = option("Prefix of the Unix sockets; the rank is appended.")
    rank: int = option("Which shard of the group this is.", 0, minimum=0)
    world_size: int = option("Shards of the group.", 1, minimum=1)
    rendezvous: str | None = option(
        "File through which the ranks of one start of the group meet.", None, env=False
    )
    epoch: int = option("Which start of the group this is.", 0, env=False, minimum=0)


def declared(config_type: type) -> list[tuple[Field[Any], Option, Any]]:
    """Field, option and type of everything `config_type` declares, in order."""
    hints = get_type_hints(config_type)
    return [(f, f.metadata["option"], hints[f.name]) for f in fields(config_type)]


def flag_of(f: Field[Any]) -> str:
    return "--" + f.name.replace("_", "-")


def env_of(f: Field[Any]) -> str | None:
    return f.name.upper() if f.metadata["option"].env else None


def to_flags(config: object) -> list[str]:
    """The command line that gives `config` again; unset options are left out."""
    flags: list[str] = []
    for f, opt, _ in declared(type(config)):
        value = getattr(config, f.name)
        if isinstance(value, bool) and not opt.takes_value:
            flags += [flag_of(f)] * value
        elif value is not None:
            flags += [flag_of(f), str(value).lower() if isinstance(value, bool) else str(value)]
    return flags
