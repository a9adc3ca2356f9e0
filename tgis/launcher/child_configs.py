"""Derives the configurations of the router and of each shard from the launcher's configuration."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from tgis import __version__
from tgis.config.model import ENGINES
from tgis.config.network import LinkOptions
from tgis.config.processes import LauncherConfig, RouterConfig, ShardConfig
from tgis.hub.gguf_files import SUFFIX
from tgis.launcher.plan import Plan, uses_gpus
from tgis.launcher.run_files import RunFiles
from tgis.logs import Scalar, process_fields
from tgis.net.addresses import TcpAddress

C = TypeVar("C", RouterConfig, ShardConfig)

LINK_OPTIONS = {f.name for f in fields(LinkOptions)}
# Options of a shard that may differ between nodes.
NODE_OPTIONS = LINK_OPTIONS | {
    "cache_home",
    "cpu_pinning",
    "cpu_threads",
    "failpoints",
    "json_output",
    "log_level",
    "speculate",
}
# Paths may differ too, but a path must be set on all nodes or on none.
PATHS = ("adapter_cache", "lora_adapters", "prefix_store_path", "speculator")


@dataclass(frozen=True)
class Start:
    """Start of a whole shard group, as node 0 announces it to every node."""

    epoch: int
    rendezvous: str
    """Where the ranks form their process group: a file, or HOST:PORT if the group spans several nodes."""


class ChildConfigs:
    def __init__(self, config: LauncherConfig, plan: Plan, files: RunFiles) -> None:
        self.launcher = config
        self._plan = plan
        self._files = files
        self.num_shards = plan.num_shards
        self._first_rank = config.node_rank * plan.num_shards
        self._world_size = config.nnodes * plan.num_shards
        self.uses_tcp = uses_tcp(config)

    def addresses(self, host: str) -> list[TcpAddress]:
        """Return the addresses of this node's shards at `host`. Each rank of the group uses two ports."""
        ranks = range(self._first_rank, self._first_rank + self.num_shards)
        return [TcpAddress(host, self.launcher.master_port + 1 + 2 * rank) for rank in ranks]

    @property
    def common(self) -> dict[str, Any]:
        """Options and model properties that must be equal on all nodes."""
        config = self.launcher
        names = {f.name for f in fields(ShardConfig)} & {f.name for f in fields(config)}
        options = {name: getattr(config, name) for name in names - NODE_OPTIONS}
        options |= {name: bool(options[name]) for name in PATHS}
        options |= {"speculator": self._plan.speculator is not None}
        options |= {"dtype": self._plan.dtype, "max_sequence_length": self._plan.max_sequence_length}
        model = {"model": self._plan.fingerprint, "version": __version__}
        return options | model | {"nnodes": config.nnodes, "num_shard": self.num_shards}

    def router(self, addresses: Path, worker: int = 0) -> RouterConfig:
        """Return the configuration of a router worker; worker 0's is also that of the engine process.

        The file `addresses` lists the addresses of shards over TCP."""
        is_split = self._plan.router_workers > 1
        own = {
            "tokenizer_path": str(self._files.tokenizer_path),
            "shard_uds_path": self._files.uds_path,
            "num_shard": self._world_size,
            "max_sequence_length": self._plan.max_sequence_length,
            # Without a name, the router uses its own default. Without an endpoint, no name is needed.
            "otlp_service_name": self.launcher.otlp_service_name if self.launcher.otlp_endpoint else None,
            "served_model_name": self.launcher.served_model_name
            or served_name(self._plan.base_name or self.launcher.model_name, self._plan.model_path),
            "compute_type": self._compute_type(),
            "auth_tokens_path": self._auth_tokens_path,
            "adapter_roots": self._adapter_roots(),
            "shard_addresses": str(addresses) if self.uses_tcp else None,
            "router_workers": self._plan.router_workers,
            "worker": worker,
            "engine_path": str(self._files.engine_path) if is_split else None,
            "metrics_dir": str(self._files.metrics_dir) if is_split else None,
            "model_sampling_path": str(self._plan.model_path / "generation_config.json"),
            "http_url_path": str(self._files.http_url_path),
        }
        return self._derive(RouterConfig, own)

    def shard(self, index: int, start: Start, host: str, listener: int | None) -> ShardConfig:
        """Return the configuration of this node's shard `index`. Other nodes reach this node at `host`.

        `listener` is the open socket of the rendezvous, for rank 0."""
        rank = self._first_rank + index
        own = {
            "model_path": str(self._plan.model_path),
            "tokenizer_path": str(self._files.tokenizer_path),
            "uds_path": self._files.uds_path,
            "rank": rank,
            "world_size": self._world_size,
            "rendezvous": start.rendezvous,
            "kernel_cache": str(self._files.path / "kernels"),
            "epoch": start.epoch,
            "dtype": self._plan.dtype,
            "deployment_framework": ENGINES.get(self.launcher.deployment_framework or ""),
            "max_sequence_length": self._plan.max_sequence_length,
            "speculator": None if self._plan.speculator is None else str(self._plan.speculator),
            **asdict(self._plan.adapters),
        }
        if self.uses_tcp:
            own |= {
                "listen_address": str(self.addresses(host)[index]),
                "local_rank": index,
                "local_size": self.num_shards,
                "node_address": host,
                "rendezvous_fd": listener if rank == 0 else None,
            }
        return self._derive(ShardConfig, own)

    def _compute_type(self) -> str:
        """Return the kind of machine that TGI's API reports."""
        return self.launcher.compute_type or ("gpu" if uses_gpus(self.launcher) else "cpu")

    @cached_property
    def _auth_tokens_path(self) -> str | None:
        """File of the bearer tokens. It is written once, because a router may restart while others read
        it."""
        tokens = self.launcher.auth_tokens
        if tokens is None:
            return self.launcher.auth_tokens_path
        return str(self._files.write("auth-tokens", tokens.text))

    def _adapter_roots(self) -> str | None:
        adapters = self._plan.adapters
        roots = filter(None, (adapters.adapter_cache, adapters.prefix_store_path))
        return os.pathsep.join(roots) or None if self.launcher.runtime_adapters else None

    def _derive(self, config_type: type[C], own: Mapping[str, Any]) -> C:
        """Build a configuration from `own`; other options get the launcher's values or their defaults."""
        names = {f.name for f in fields(config_type)} & {f.name for f in fields(self.launcher)} - own.keys()
        if not self.uses_tcp:  # a launcher may be given link options that its group does not use
            names -= LINK_OPTIONS
        return config_type(**{name: getattr(self.launcher, name) for name in names}, **own)


def uses_tcp(config: LauncherConfig) -> bool:
    """Return True if the router reaches shards over TCP, because they may be on other machines."""
    return config.nnodes > 1 or config.headless


def served_name(model_name: str, model_path: Path) -> str:
    """Return a model's name for clients: its id on the hub, or the name of its folder or file.

    Parent directories are left out, because their names are private."""
    path = Path(os.path.abspath(model_name))
    if model_name.endswith(SUFFIX) and path.is_file():
        return path.stem
    # A GGUF model is served from a temporary directory, which links to the files.
    is_linked = path.is_dir() and any(
        (model_path / file.name).is_symlink() for file in path.glob(f"*{SUFFIX}")
    )
    return path.name if Path(model_name) == model_path or is_linked else model_name


def line_fields(
    config: LauncherConfig, process: str, options: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Scalar] | None:
    """Return the JSON fields of each log line of a child with these options; None if lines are text."""
    if not config.json_output:
        return None
    return process_fields("launcher", vars(config)) | process_fields(process, options)
