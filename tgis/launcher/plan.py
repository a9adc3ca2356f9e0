"""Checks the launcher's configuration and the model before any process is started."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tgis.config.model import AdapterOptions
from tgis.config.processes import LauncherConfig
from tgis.config.serving import SHORT_SEQUENCE
from tgis.errors import OperatorError
from tgis.hub import model_files
from tgis.hub.cache import cache_root, find_model, find_model_files
from tgis.hub.gguf_files import TOKENIZER, UNFINISHED_TOKENIZER
from tgis.hub.speculators import find_base_name, find_speculator
from tgis.hub.startup_adapters import resolve_adapter_options
from tgis.process.control_groups import count_cores
from tgis.process.gpus import count_gpus, has_gpus

logger = logging.getLogger(__name__)

MIN_LENGTH = 2
END_S = 5.0  # time for processes to exit after the last request has ended
GIVE_UP_S = 12.0  # time for the router to end its calls if the shards are not restarted
FEW_CORES = 4  # up to which the default is one router worker
MAX_ROUTER_WORKERS = 8  # by default
ALL_DEVICES = (None, "all", "void")  # values of NVIDIA_VISIBLE_DEVICES that list no devices


class LaunchError(OperatorError):
    """Error for a service that cannot start or has failed; its text is one line."""


@dataclass(frozen=True)
class Plan:
    """Properties of the model and the shards, derived before any process starts."""

    model_path: Path
    tokenizer_path: Path
    """Directory of the tokenizer's files."""
    max_sequence_length: int
    dtype: str | None
    num_shards: int
    router_workers: int
    """Number of router processes that share the public ports; a single one also runs the engine."""
    has_fast_tokenizer: bool
    """True if there is a tokenizer.json or a GGUF model's is being written; otherwise one is created at
    start-up."""
    adapters: AdapterOptions
    fingerprint: str
    """Fingerprint of the model's configuration and weights, from the names and sizes of their files."""
    speculator: Path | None = None
    base_name: str | None = None
    """Name of the served model if the configured name is that of a speculator for it."""


def make_plan(config: LauncherConfig, gguf_path: Path | None = None, num_shards: int | None = None) -> Plan:
    """Check the configuration and locate the model, which is in `gguf_path` if given. The shards are counted
    unless `num_shards` is given.

    Raises LaunchError, AdapterOptionsError, CacheConflictError or ModelNotFoundError."""
    if config.dtype and config.dtype_str and config.dtype != config.dtype_str:
        raise LaunchError("dtype and dtype_str args both provided with different values")
    _check_budget(config)
    num_shards = num_shards or count_shards(config, uses_gpus(config))
    _warn_of_older_names(config)
    cache = hub_cache(config)
    path = gguf_path or find_model(config.model_name, config.revision, cache)
    uses_speculator = config.speculate != 0
    speculator = find_speculator(config.speculator, cache) if config.speculator and uses_speculator else None
    if base_name := find_base_name(path):  # TGI's choice: a speculator names its model
        if config.speculator is not None:
            raise LaunchError(
                f"speculator: {config.model_name} is a speculator itself: leave out one of them"
            )
        speculator = path.absolute() if uses_speculator else None
        path = find_model(base_name, None, cache)
    if (config.speculator or base_name) and not uses_speculator:
        logger.info("no speculator is loaded, because --speculate is 0")
    model_config = model_files.read_config(path)
    tokenizer = _find_tokenizer(config.tokenizer_name, cache) if config.tokenizer_name else path
    has_fast = any((tokenizer / name).is_file() for name in (UNFINISHED_TOKENIZER, TOKENIZER))
    if not has_fast and not model_files.has_tokenizer_to_convert(tokenizer):
        raise LaunchError("No existing fast tokenizer (tokenizer.json) found")
    length = _choose_length(config.max_sequence_length, model_config, config.rope_factor)
    if config.max_input_tokens is not None and config.max_input_tokens >= length:
        raise LaunchError(
            f"max_input_tokens ({config.max_input_tokens}) must be less than max_sequence_length ({length})"
        )
    adapters = resolve_adapter_options(config, length, cache)
    dtype = config.dtype or config.dtype_str
    fingerprint = model_files.fingerprint(path)
    workers = choose_router_workers(config.router_workers, count_cores()) if has_router(config) else 0
    return Plan(
        path,
        tokenizer,
        length,
        dtype,
        num_shards,
        workers,
        has_fast,
        adapters,
        fingerprint,
        speculator,
        base_name,
    )


def has_router(config: LauncherConfig) -> bool:
    return not (config.headless or config.node_rank)


def choose_router_workers(configured: int | None, cores: int) -> int:
    """Return the number of router workers.

    The default on many cores is a quarter of them, because the shards and the engine need the others."""
    number = configured or (1 if cores <= FEW_CORES else min(cores // 4, MAX_ROUTER_WORKERS))
    source = "user-defined" if configured else f"default on {cores} cores"
    logger.info("router_workers is %d (%s)", number, source)
    return number


def uses_gpus(config: LauncherConfig) -> bool:
    """Return True if the shards use GPUs unless torch or the model prevents it."""
    return config.device != "cpu" and has_gpus(config.cuda_visible_devices)


def count_shards(config: LauncherConfig, is_cuda: bool) -> int:
    """Return the configured number of shards, else that of visible devices, else 1. Raises LaunchError."""
    configured = _configured_shards(config)
    if config.sharded and configured == 1:
        raise LaunchError("sharded is true, but num_shard is 1: leave out one of them")
    if configured:
        return configured
    if config.sharded:
        return _count_gpus_to_share(config, is_cuda)
    if config.sharded is False:
        logger.info("using 1 shard: sharded is false and num_shard is unset")
        return 1
    devices = _listed_devices(config)
    if devices is None:
        return 1
    if not is_cuda:
        logger.info("using 1 shard: visible devices are not counted without a GPU; see --num-shard")
        return 1
    return len(devices.split(","))


def _configured_shards(config: LauncherConfig) -> int | None:
    if config.num_shard and config.num_gpus and config.num_shard != config.num_gpus:
        counts = f"({config.num_gpus} and {config.num_shard})"
        raise LaunchError(f"NUM_GPUS and num_shard are set to different values {counts}")
    return config.num_shard or config.num_gpus


def _listed_devices(config: LauncherConfig) -> str | None:
    devices = config.cuda_visible_devices
    return config.nvidia_visible_devices if devices is None else devices


def _count_gpus_to_share(config: LauncherConfig, is_cuda: bool) -> int:
    """Return the number of visible GPUs. Raises LaunchError if there are fewer than two."""
    listed = _listed_devices(config)
    visible = count_gpus() if listed in ALL_DEVICES else len((listed or "").split(","))
    if not is_cuda or visible < 2:
        raise LaunchError(
            f"sharded is true, which needs two or more visible GPUs, not {visible if is_cuda else 0}: "
            "use --num-shard to set the number of shards"
        )
    return visible


def _find_tokenizer(name: str, cache: Path) -> Path:
    try:
        return find_model_files(name, None, cache)
    except model_files.ModelNotFoundError as error:
        raise LaunchError(f"tokenizer_name: {name} is neither a directory nor in the hub cache") from error


def _warn_of_older_names(config: LauncherConfig) -> None:
    for name in ("transformers_cache", "huggingface_hub_cache"):
        if getattr(config, name):
            logger.warning("%s is an older name of HF_HUB_CACHE", name.upper())


def hub_cache(config: LauncherConfig) -> Path:
    """Return the root of the hub cache. Raises CacheConflictError."""
    return cache_root(
        config.hf_hub_cache,
        config.transformers_cache,
        config.huggingface_hub_cache,
        config.hf_home,
        config.home,
    )


def _check_budget(config: LauncherConfig) -> None:
    """Check that requests can finish before the pod is killed. Raises LaunchError."""
    if (grace_s := config.termination_grace_period) is None:
        return
    left_s = max(0.0, grace_s - config.pre_stop_delay - END_S)
    if config.shutdown_timeout > left_s:
        raise LaunchError(
            f"shutdown_timeout {config.shutdown_timeout:g} is more than the {left_s:g} s that are left of "
            f"termination_grace_period {grace_s:g} after pre_stop_delay {config.pre_stop_delay:g} and "
            f"{END_S:g} s for the processes to exit"
        )


def _choose_length(
    configured: int | None, model_config: dict[str, Any], rope_factor: float | None = None
) -> int:
    """Return the maximum length of a sequence in tokens, input plus output. Raises LaunchError."""
    model_length = model_files.length_of_model(model_config)
    length = configured or model_length or model_files.DEFAULT_LENGTH
    source = "user-defined" if configured else "model" if model_length else "default"
    logger.info("max_sequence_length is %d (%s)", length, source)
    if length < MIN_LENGTH:
        raise LaunchError(SHORT_SEQUENCE.format(value=length))
    if model_length and length > model_length * (rope_factor or 1):
        logger.warning("max_sequence_length %d is more than the model's %d", length, model_length)
    elif model_length and rope_factor and not configured:
        maximum = int(model_length * rope_factor)
        logger.info("rope_factor allows a max_sequence_length of %d, but does not set it", maximum)
    return length
