"""Loads soft prompts and adapters for a model: opens the store and the artifact cache, computes the memory
limits, and builds this rank's part from a cached copy."""

import logging
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tgis.config.model import ENGINES
from tgis.config.processes import ShardConfig
from tgis.hub import model_files
from tgis.prompts.artifact_cache import ArtifactCache
from tgis.prompts.errors import NotTunableError
from tgis.prompts.soft_prompt import AdapterRequirements
from tgis.prompts.store import AdapterStore
from tgis.shard.adapters.lora_mapping import read_adapter
from tgis.shard.adapters.registry import LoadedAdapter, LoadedAdapters, LoadedPrompt
from tgis.shard.layers.ops import Parts
from tgis.shard.models import registry as model_registry
from tgis.shard.models.interface import AdaptableModel, Model, UnsupportedModelError

logger = logging.getLogger(__name__)

MIB = 1 << 20


@dataclass(frozen=True)
class AdapterLimits:
    """Per-rank limits: bytes of loaded soft prompts and adapters, and tokens per soft prompt."""

    prompt_bytes: int
    adapter_bytes: int
    max_prompt_tokens: int

    @property
    def num_bytes(self) -> int:
        return self.prompt_bytes + self.adapter_bytes

    def require(self, parts: Parts, prompt_width: int, is_encoder_decoder: bool) -> AdapterRequirements:
        """Return the requirements of the model that was built from `parts`."""
        return AdapterRequirements(
            prompt_width=prompt_width,
            dtype=parts.dtype,
            is_encoder_decoder=is_encoder_decoder,
            max_prompt_tokens=self.max_prompt_tokens,
            max_prompt_bytes=self.prompt_bytes,
            max_adapter_bytes=self.adapter_bytes,
        )


def adapter_limits(config: ShardConfig, is_tunable: bool, max_sequence_length: int) -> AdapterLimits:
    """Return the limits. They are zero bytes if nothing is configured, or if the model supports neither soft
    prompts nor adapters (`is_tunable` is false). Raises UnsupportedModelError."""
    if config.lora_adapters and not is_tunable:
        raise UnsupportedModelError(
            "--lora-adapters needs the service's own engine: leave DEPLOYMENT_FRAMEWORK unset"
            if _is_own_model(config)
            else "--lora-adapters needs the service's own engine, which does not run this model"
        )
    has_prompts = is_tunable and config.prefix_store_path
    has_adapters = has_prompts or (is_tunable and (config.adapter_cache or config.lora_adapters))
    return AdapterLimits(
        config.prompt_cache_size_mb * MIB if has_prompts else 0,
        config.adapter_cache_size_mb * MIB if has_adapters else 0,
        config.max_prompt_prefix_length or -(-max_sequence_length // 2),
    )


def open_artifact_cache(config: ShardConfig) -> ArtifactCache:
    """Open the artifact cache that all ranks share, next to their sockets."""
    return ArtifactCache(Path(f"{config.uds_path}-contents"))


def open_adapters(config: ShardConfig, model: Model) -> LoadedAdapters:
    return LoadedAdapters(partial(_read, open_artifact_cache(config), model, _is_own_model(config)))


def open_store(config: ShardConfig, model: Model, max_sequence_length: int) -> AdapterStore:
    """Open the store of the configured directories, with the limits for `model`."""
    required = None
    if isinstance(model, AdaptableModel):
        limits = adapter_limits(config, True, max_sequence_length)
        required = limits.require(model.parts, model.prompt_width, model.spec.is_encoder_decoder)
    artifacts = open_artifact_cache(config)
    if config.rank == 0:  # only rank 0 gets Find calls
        _warn(config, required)
        if required is not None:
            _warn_if_disk_full(artifacts.directory, required.max_prompt_bytes + required.max_adapter_bytes)
    prompts = Path(config.prefix_store_path) if config.prefix_store_path else None
    adapters = Path(config.adapter_cache) if config.adapter_cache else None
    named = read_names(config.lora_adapters)
    return AdapterStore(artifacts, required, prompts, adapters, named, _is_own_model(config))


def read_names(text: str | None) -> dict[str, Path]:
    """Parse `name=directory,...`, which the launcher passes."""
    pairs = (pair.split("=", 1) for pair in text.split(",")) if text else ()
    return {name: Path(path) for name, path in pairs}


def _is_own_model(config: ShardConfig) -> bool:
    """Return whether the service's own engine would run the model if DEPLOYMENT_FRAMEWORK were unset."""
    if ENGINES.get(config.deployment_framework or "") != "hf_transformers":
        return False
    return model_registry.serves(model_files.read_json(Path(config.model_path), "config.json"))


def _warn(config: ShardConfig, required: AdapterRequirements | None) -> None:
    """Warn of settings that make requests fail. A missing directory is no error, because it may appear
    later."""
    paths = {"prefix_store_path": config.prefix_store_path, "adapter_cache": config.adapter_cache}
    for option, path in paths.items():
        if path and not Path(path).is_dir():
            logger.warning("%s: the directory %s does not exist", option, path)
    if required is None and any(paths.values()):
        refusal = NotTunableError(_is_own_model(config))
        logger.warning("requests for soft prompts and adapters will fail: %s", refusal)


def _warn_if_disk_full(directory: Path, num_bytes: int) -> None:
    """Warn if the disk has less than `num_bytes` free for copies of soft prompts and adapters."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        logger.warning(
            "%s: copies of soft prompts and adapters may need %d MiB, but only %d MiB are free",
            directory,
            num_bytes // MIB,
            free // MIB,
        )


def _read(artifacts: ArtifactCache, model: Model, is_own_model: bool, digest: str) -> LoadedAdapter:
    """Read this rank's part. Raises NotTunableError, AdapterError, MissingArtifactError and OSError."""
    if not isinstance(model, AdaptableModel):
        raise NotTunableError(is_own_model)
    artifact = artifacts.open(digest)
    if artifact.kind == "adapter":
        model.parts.kernels.prepare_adapters()
        return read_adapter(model.parts, artifact.tensors, artifact.about["scales"])
    device = model.parts.kernels.device
    empty = torch.empty(0, model.prompt_width, dtype=model.parts.dtype)
    mapped = (artifact.tensors.get(name, empty) for name in ("decoder", "encoder"))
    return LoadedPrompt(*(tensor.to(device, copy=True) for tensor in mapped))
