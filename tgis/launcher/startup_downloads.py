"""Downloads the model, tokenizer and adapters that are not on disk, if --compat is given."""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tgis.config.processes import LauncherConfig
from tgis.hub.cache import ADAPTER_CONFIG, HUB_ID, cache_entry, find_model, find_snapshot
from tgis.hub.gguf_files import find_gguf
from tgis.hub.model_files import ModelNotFoundError, is_complete
from tgis.hub.speculators import MTP, find_base_name
from tgis.launcher.child_configs import line_fields
from tgis.launcher.plan import END_S, LaunchError, hub_cache
from tgis.process.child import Child
from tgis.process.output_lines import LineForm

logger = logging.getLogger(__name__)

TRUE = ("1", "ON", "YES", "TRUE")  # values that huggingface_hub accepts as true, in upper or lower case
ADAPTER_FILES = ".safetensors,.json"
SPECULATOR_FILES = ".safetensors,.bin,.pt,.json"
TOKENIZER_FILES = ".json,.jinja,.model,.txt,.tiktoken"


async def download_missing(config: LauncherConfig) -> None:
    """Download the model, the tokenizer, the speculator and the adapters that are ids of a hub and missing
    from its cache.

    Without `--compat`, or offline, nothing is downloaded. Raises LaunchError, CacheConflictError and
    ModelNotFoundError."""
    offline = (config.hf_hub_offline or config.transformers_offline or "").upper() in TRUE
    if config.compat is None or offline:
        return
    cache = hub_cache(config)
    for arguments in [*_missing(config, cache)]:
        await _download(config, arguments, cache)
    base = _find_base_name(config, cache)
    if base and _lacks_model(replace(config, model_name=base, revision=None), cache):
        await _download(config, _arguments(base, None), cache)


def _missing(config: LauncherConfig, cache: Path) -> Iterator[list[str]]:
    """Yield the arguments of `download-weights` for each missing download. Raises LaunchError."""
    if _lacks_model(config, cache):
        if config.trust_remote_code and not config.revision:
            raise LaunchError(
                f"trust_remote_code: {config.model_name} would be downloaded with code that is run: set "
                "--revision to a trusted commit"
            )
        yield _arguments(config.model_name, config.revision)
    if (name := config.tokenizer_name) and _lacks(name, find_snapshot(cache_entry(name, cache), None)):
        yield [*_arguments(name, None), "--extension", TOKENIZER_FILES, "--no-auto-convert"]
    if (
        (name := config.speculator)
        and name != MTP
        and config.speculate != 0
        and _lacks(name, find_snapshot(cache_entry(name, cache), None))
    ):
        yield [*_arguments(name, None), "--extension", SPECULATOR_FILES, "--no-auto-convert"]
    for entry in map(str.strip, (config.lora_adapters or "").split(",")):
        name, _, revision = entry.partition("@")
        snapshot = find_snapshot(cache_entry(name, cache), revision or None)
        if "=" not in entry and _lacks(name, snapshot / ADAPTER_CONFIG):
            yield [*_arguments(name, revision), "--extension", ADAPTER_FILES, "--no-auto-convert"]


def _arguments(name: str, revision: str | None) -> list[str]:
    return ["download-weights", name, *(["--revision", revision] if revision else [])]


def _lacks_model(config: LauncherConfig, cache: Path) -> bool:
    """Return True if the model's name is an id of the hub and the model is not complete in the cache."""
    name = config.model_name
    if not _is_hub_id(name):
        return False
    try:
        if find_gguf(name, config.revision, cache) is not None:
            return False
        return not is_complete(find_model(name, config.revision, cache))
    except ModelNotFoundError:
        return True


def _find_base_name(config: LauncherConfig, cache: Path) -> str | None:
    """Return the name of the model for which the named speculator was trained, if it is one."""
    try:
        return find_base_name(find_model(config.model_name, config.revision, cache))
    except ModelNotFoundError:
        return None


def _lacks(name: str, path: Path) -> bool:
    return _is_hub_id(name) and not path.exists()


def _is_hub_id(name: str) -> bool:
    return HUB_ID.fullmatch(name) is not None and not os.path.exists(name)


async def _download(config: LauncherConfig, arguments: list[str], cache: Path) -> None:
    """Run `download-weights`. If cancelled, let it end by itself, so that the next start can resume it."""
    name = arguments[1]
    logger.info("%s is not on disk: downloading it to %s", name, cache)
    env = {
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": "0",
        **({"HF_TOKEN": config.hf_token.text} if config.hf_token else {}),
        **({"HF_ENDPOINT": config.hf_endpoint} if config.hf_endpoint else {}),
    }
    line_form = LineForm("Download: ", line_fields(config, "download"))
    child = Child("download", arguments, line_form, env=env)
    try:
        await child.start()
        end = await child.wait()
    except asyncio.CancelledError:
        child.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(child.wait(), END_S)
        logger.info("the download of %s was stopped; the next start resumes it", name)
        raise
    finally:
        await child.kill()
    if not end.is_success:
        raise LaunchError(end.text)
