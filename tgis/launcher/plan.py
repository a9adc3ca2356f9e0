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
from tgis.hub.startup_adapters import resolve_adapter_options
from tgis.process.control_groups import count_cores
from tgis.process.gpus import count_gpus, has_gpus

logger = logging.getLogger(__name__)

MIN_LENGTH = 2
END_S = 5.0  # time for processes to exit after the last request has ended
GIVE_UP_S = 12.0  # time for the router to end its calls when the shards are not started again
FEW_CORES, MAX_ROUTER_WORKERS = 4, 8  # for the default number of router workers
TOKENIZER = "tokenizer.json"
ALL_DEVICES = (None, "all", "void")  # lists of visible devices that name none


class LaunchError(OperatorError):
    """Error for a service that cannot start or has failed. The text is one line."""


@dataclass(frozen=True)
class Plan:
    """Facts about the model and the shards, derived before any process is started."""

    model_path: Path
    tokenizer_path: Path
    """Directory of the tokenizer's files."""
    max_sequence_length: int
    dtype: str | None
    num_shards: int
    router_workers: int
    """Router processes that share the public ports; a single one runs the engine too."""
    has_fast_tokenizer: bool
    """True if there is a tokenizer.json; otherwise one is made at the start."""
    adapters: AdapterOptions
    fingerprint: str
    """Fingerprint of the model's configuration and weights, by the names and sizes of their files."""


def make_plan(config: LauncherConfig, made: Path | None = None) -> Plan:
    """Check the configuration and find the model, which is in the directory `made` if there is one.

    Raises LaunchError, AdapterOptionsError, CacheConflictError or ModelNotFoundError."""
    if config.dtype and config.dtype_str and config.dtype != config.dtype_str:
        raise LaunchError("dtype and dtype_str args both provided with different values")
    _check_budget(config)
    is_cuda = config.device != "cpu" and has_gpus(config.cuda_visible_devices)
    num_shards = count_shards(config, is_cuda)
    _warn_of_older_names(config)
    cache = hub_cache(config)
    path = made or find_model(config.model_name, config.revision, cache)
    model_config = model_files.read_config(path)
    tokenizer = _find_tokenizer(config.tokenizer_name, cache) if config.tokenizer_name else path
    has_fast = (tokenizer / TOKENIZER).is_file()
    if not has_fast and not model_files.has_tokenizer_to_convert(tokenizer):
        raise LaunchError(f"No existing fast tokenizer ({TOKENIZER}) found")
    length = _choose_length(config.max_sequence_length, model_config, config.rope_factor)
    if config.max_input_tokens is not None and config.max_input_tokens >= length:
        raise LaunchError(
            f"max_input_tokens ({config.max_input_tokens}) must be less than max_sequence_length ({length})"
        )
    adapters = resolve_adapter_options(config, length, cache)
    dtype, fingerprint = config.dtype or config.dtype_str, model_files.fingerprint(path)
    workers = choose_router_workers(config.router_workers, count_cores()) if has_router(config) else 0
    return Plan(path, tokenizer, length, dtype, num_shards, workers, has_fast, adapters, fingerprint)


def has_router(config: LauncherConfig) -> bool:
    return not (config.headless or config.node_rank)


def choose_router_workers(asked: int | None, cores: int) -> int:
    """Return the number of router workers: on more than a few cores by default a quarter of them, because the
    shards and the engine need the others."""
    number = asked or (1 if cores <= FEW_CORES else min(cores // 4, MAX_ROUTER_WORKERS))
    logger.info("router_workers is %d (%s)", number, "user-defined" if asked else f"default on {cores} cores")
    return number


def count_shards(config: LauncherConfig, is_cuda: bool) -> int:
    """Return the configured number of shards, else that of visible devices, else 1. Raises LaunchError."""
    asked = _asked_shards(config)
    if config.sharded and asked == 1:
        raise LaunchError("sharded is true, and num_shard is 1: leave one of both out")
    if asked:
        return asked
    if config.sharded:
        return _count_gpus_to_share(config, is_cuda)
    if config.sharded is False:
        logger.info("1 shard, as no number of shards is given")
        return 1
    devices = _listed_devices(config)
    if devices is None:
        return 1
    if not is_cuda:
        logger.info("visible devices are not counted without a GPU: 1 shard; --num-shard sets another number")
        return 1
    return len(devices.split(","))


def _asked_shards(config: LauncherConfig) -> int | None:
    if config.num_shard and config.num_gpus and config.num_shard != config.num_gpus:
        counts = f"({config.num_gpus} and {config.num_shard})"
        raise LaunchError(f"NUM_GPUS and num_shard are set to different values {counts}")
    return config.num_shard or config.num_gpus


def _listed_devices(config: LauncherConfig) -> str | None:
    devices = config.cuda_visible_devices
    return config.nvidia_visible_devices if devices is None else devices


def _count_gpus_to_share(config: LauncherConfig, is_cuda: bool) -> int:
    """Return the number of visible GPUs. Raises LaunchError if there are not several."""
    listed = _listed_devices(config)
    visible = count_gpus() if listed in ALL_DEVICES else len((listed or "").split(","))
    if not is_cuda or visible < 2:
        raise LaunchError(
            f"sharded is true, which needs two visible GPUs or more, not {visible if is_cuda else 0}: "
            "--num-shard sets another number of shards"
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
    """Check that requests can end before the pod is killed, which would lose them. Raises LaunchError."""
    if (grace_s := config.termination_grace_period) is None:
        return
    left_s = max(0.0, grace_s - config.pre_stop_delay - END_S)
    if config.shutdown_timeout > left_s:
        raise LaunchError(
            f"shutdown_timeout {config.shutdown_timeout:g} is more than the {left_s:g} s that are left of "
            f"termination_grace_period {grace_s:g} after pre_stop_delay {config.pre_stop_delay:g} and "
            f"{END_S:g} s for the processes to exit"
        )


def _choose_length(asked: int | None, model_config: dict[str, Any], rope_factor: float | None = None) -> int:
    """Return the longest sequence in tokens, input and output together. Raises LaunchError."""
    of_model = model_files.length_of_model(model_config)
    length = asked or of_model or model_files.DEFAULT_LENGTH
    source = "user-defined" if asked else "model" if of_model else "default"
    logger.info("max_sequence_length is %d (%s)", length, source)
    if length < MIN_LENGTH:
        raise LaunchError(SHORT_SEQUENCE.format(value=length))
    if of_model and length > of_model * (rope_factor or 1):
        logger.warning("max_sequence_length %d is more than the model's %d", length, of_model)
    elif of_model and rope_factor and not asked:
        most = int(of_model * rope_factor)
        logger.info("rope_factor allows a max_sequence_length of %d, but does not set it", most)
    return length
