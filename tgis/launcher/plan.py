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
from tgis.hub.cache import cache_root, find_model
from tgis.hub.startup_adapters import resolve_adapter_options
from tgis.process.gpus import has_gpus

logger = logging.getLogger(__name__)

MIN_LENGTH = 2
END_S = 5.0  # time for processes to exit after the last request has ended
GIVE_UP_S = 12.0  # time for the router to end its calls when the shards are not started again
TOKENIZER = "tokenizer.json"


class LaunchError(OperatorError):
    """Error for a service that cannot start or has failed. The text is one line."""


@dataclass(frozen=True)
class Plan:
    """Facts about the model and the shards, derived before any process is started."""

    model_path: Path
    max_sequence_length: int
    dtype: str | None
    num_shards: int
    has_fast_tokenizer: bool
    """True if the model has a tokenizer.json; otherwise one is made at the start."""
    adapters: AdapterOptions
    fingerprint: str
    """Fingerprint of the model's configuration and weights, by the names and sizes of their files."""


def make_plan(config: LauncherConfig) -> Plan:
    """Check the configuration and find the model.

    Raises LaunchError, AdapterOptionsError, CacheConflictError or ModelNotFoundError."""
    if config.dtype and config.dtype_str and config.dtype != config.dtype_str:
        raise LaunchError("dtype and dtype_str args both provided with different values")
    _check_budget(config)
    is_cuda = config.device != "cpu" and has_gpus(config.cuda_visible_devices)
    num_shards = count_shards(config, is_cuda)
    cache = _cache_root(config)
    path = find_model(config.model_name, config.revision, cache)
    model_config = model_files.read_config(path)
    has_fast = (path / TOKENIZER).is_file()
    if not has_fast and not model_files.has_tokenizer_to_convert(path):
        raise LaunchError(f"No existing fast tokenizer ({TOKENIZER}) found")
    length = _choose_length(config.max_sequence_length, model_config, config.rope_factor)
    adapters = resolve_adapter_options(config, length, cache)
    dtype, fingerprint = config.dtype or config.dtype_str, model_files.fingerprint(path)
    return Plan(path, length, dtype, num_shards, has_fast, adapters, fingerprint)


def count_shards(config: LauncherConfig, is_cuda: bool) -> int:
    """Return the configured number of shards, else that of visible devices, else 1. Raises LaunchError."""
    if config.num_shard and config.num_gpus and config.num_shard != config.num_gpus:
        counts = f"({config.num_gpus} and {config.num_shard})"
        raise LaunchError(f"NUM_GPUS and num_shard are set to different values {counts}")
    if asked := config.num_shard or config.num_gpus:
        return asked
    devices = config.cuda_visible_devices
    if devices is None:
        devices = config.nvidia_visible_devices
    if devices is None:
        return 1
    if not is_cuda:
        logger.info("visible devices are not counted without a GPU: 1 shard; --num-shard sets another number")
        return 1
    return len(devices.split(","))


def _cache_root(config: LauncherConfig) -> Path:
    for name in ("transformers_cache", "huggingface_hub_cache"):
        if getattr(config, name):
            logger.warning("%s is an older name of HF_HUB_CACHE", name.upper())
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
