"""Starts the shards, then the router, watches over all of them and stops them: a group of shards that dies is
started again, a router that dies ends everything, and nothing outlives the launcher."""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from tgis.child import Child
from tgis.config import ENGINES, LauncherConfig, RouterConfig, ShardConfig
from tgis.declaration import to_flags
from tgis.frames import steps_path
from tgis.launch_plan import END_S, TOKENIZER, LaunchError, Plan, plan
from tgis.ports import listen
from tgis.run_directory import RunDirectory

logger = logging.getLogger(__name__)

CRASH_WINDOW_S = 300.0
MAX_CRASHES = 6  # of the shards, within the window; a request that kills them takes three
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 4.0
POLL_S = 0.05
MAX_SOCKET_PATH = 107  # bytes, of Linux
# How often a thread of a shard looks for its next piece of work before it sleeps. By default that takes
# milliseconds, in which it keeps a core from the router, the clients and the other threads of its own step:
# beside one busy process a step then takes ten times as long. Not to look at all costs a wake-up per
# operator, half the speed of a small model.
# NCCL is told the interface by which shards meet: like all else among them, on this machine alone.
SHARD_ENV = {"GOMP_SPINCOUNT": "2000", "NCCL_SOCKET_IFNAME": "lo"}
# What ends a process that touches shared memory which there is none of.
BUS_ERROR = "SIGBUS"
BUS_ERROR_HINT = "; the shards may lack shared memory: mount at least 1 GB of it at /dev/shm"

C = TypeVar("C", RouterConfig, ShardConfig)


def run(config: LauncherConfig) -> None:
    """Returns after a clean stop. Raises PortError and what `plan` raises."""
    asyncio.run(_Launcher(config, plan(config)).run())


class _Launcher:
    def __init__(self, config: LauncherConfig, planned: Plan) -> None:
        self._config, self._plan = config, planned
        self._directory: RunDirectory | None = None
        self._epoch = 0
        self._converter: Child | None = None
        self._shards: list[Child] = []
        self._router: Child | None = None
        self._stopping, self._aborting = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        for port in (self._config.port, self._config.grpc_port):
            listen(self._config.bind, port).close()  # the router opens it for good, when the model is loaded
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        self._directory = RunDirectory()
        logger.info("loading %s on %d shards", self._plan.model_path, self._plan.num_shards)
        main = asyncio.create_task(self._serve())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((main, stopping), return_when=asyncio.FIRST_COMPLETED)
            if main.done():
                main.result()
            else:
                await self._drain(main)
        finally:
            main.cancel()
            stopping.cancel()
            await asyncio.gather(main, stopping, return_exceptions=True)
            await self._kill_all()
            self._remove_files()

    async def _serve(self) -> None:
        """Raises LaunchError when something has ended that should not have."""
        self._check_sockets()
        if not self._plan.has_fast_tokenizer:
            await self._convert_tokenizer()
        shards = asyncio.create_task(self._run_shards())
        self._router = Child("router", ["router", *to_flags(self._router_config())])
        await self._router.start()  # it waits for the shards itself
        router = asyncio.create_task(self._router.wait())
        try:
            await asyncio.wait((router, shards), return_when=asyncio.FIRST_COMPLETED)
            if shards.done():
                shards.result()
            raise LaunchError(router.result())
        finally:
            router.cancel()
            shards.cancel()

    async def _convert_tokenizer(self) -> None:
        """By a child, for the libraries that can do it are large. Raises LaunchError."""
        logger.info("converting the tokenizer: there is no %s", TOKENIZER)
        self._tokenizer_path.mkdir()
        arguments = [str(self._plan.model_path.absolute()), "--output-path", str(self._tokenizer_path)]
        self._converter = Child("tokenizer", ["convert-to-fast-tokenizer", *arguments], "Tokenizer: ")
        await self._converter.start()
        end = await self._converter.wait()
        if not (self._tokenizer_path / TOKENIZER).is_file():
            raise LaunchError(end)

    async def _run_shards(self) -> None:
        """Starts the whole group, and again whenever one of it has ended; raises LaunchError when the first
        start fails, or after too many times."""
        await self._start_shards()
        crashes: list[float] = []
        while True:
            reason, now = await self._first_end(), time.monotonic()
            crashes = [at for at in crashes if now - at < CRASH_WINDOW_S] + [now]
            if len(crashes) > MAX_CRASHES:
                raise LaunchError(f"{reason}; giving up after {MAX_CRASHES} restarts of the shards")
            logger.error("%s; starting the shards again", reason)
            await asyncio.gather(*(child.kill() for child in self._shards))
            if len(crashes) > 1:
                await asyncio.sleep(min(FIRST_BACKOFF_S * 2 ** (len(crashes) - 2), MAX_BACKOFF_S))
            with contextlib.suppress(
                LaunchError
            ):  # the next turn of the loop finds what has ended, and counts it
                await self._start_shards()

    async def _start_shards(self) -> None:
        """Returns when all of them listen: a shard's socket appears when its model is loaded."""
        self._epoch += 1
        num_shards = self._plan.num_shards
        for path in self._sockets:
            path.unlink(missing_ok=True)
        self._shards = [
            Child(
                f"shard {rank}",
                ["serve", *to_flags(self._shard_config(rank))],
                f"Shard {rank}: ",
                SHARD_ENV,
                beats=True,
            )
            for rank in range(num_shards)
        ]
        await asyncio.gather(*(child.start() for child in self._shards))
        ended = asyncio.create_task(self._first_end())
        try:
            while not all(path.exists() for path in self._sockets):
                await asyncio.wait((ended,), timeout=POLL_S)
                if ended.done():
                    raise LaunchError(ended.result())
        finally:
            ended.cancel()

    async def _first_end(self) -> str:
        """How the first shard to end ended."""
        waits = [asyncio.create_task(child.wait()) for child in self._shards]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            reason = next(iter(done)).result()
            return reason + BUS_ERROR_HINT if len(waits) > 1 and reason.endswith(BUS_ERROR) else reason
        finally:
            for wait in waits:
                wait.cancel()

    async def _drain(self, main: "asyncio.Task[None]") -> None:
        """The router finishes what is in flight, while the shards are still watched over. Raises LaunchError
        where a second signal ends that."""
        if self._router is None:
            return
        self._router.signal(signal.SIGTERM)
        aborting = asyncio.create_task(self._aborting.wait())
        timeout_s = self._config.shutdown_timeout + END_S
        await asyncio.wait((main, aborting), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        aborting.cancel()
        if self._aborting.is_set() and not main.done():
            raise LaunchError("a second signal ended the service at once")

    async def _kill_all(self) -> None:
        if self._router is not None:
            await self._router.kill()
        if self._converter is not None:
            await self._converter.kill()
        await asyncio.gather(*(child.kill() for child in self._shards))

    def _remove_files(self) -> None:
        """Of this run; the operator may have put the shards' own elsewhere."""
        for path in self._sockets:
            for socket in (path, Path(steps_path(str(path)))):
                with contextlib.suppress(OSError):
                    socket.unlink(missing_ok=True)
        shutil.rmtree(f"{self._uds_path}-contents", ignore_errors=True)
        if self._directory is not None:
            self._directory.remove()

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            self._aborting.set()
        self._stopping.set()

    @property
    def _path(self) -> Path:
        assert self._directory is not None, "the run has begun"
        return self._directory.path

    @property
    def _uds_path(self) -> str:
        return self._config.shard_uds_path or str(self._path / "shard")

    @property
    def _sockets(self) -> list[Path]:
        return [Path(f"{self._uds_path}-{rank}") for rank in range(self._plan.num_shards)]

    def _check_sockets(self) -> None:
        """Before minutes go by until a shard finds it out. Raises LaunchError."""
        longest = steps_path(str(self._sockets[-1]))
        if len(os.fsencode(longest)) > MAX_SOCKET_PATH:
            raise LaunchError(
                f"{longest} is too long for a socket's path: set --shard-uds-path or a shorter TMPDIR"
            )

    @property
    def _tokenizer_path(self) -> Path:
        return self._plan.model_path if self._plan.has_fast_tokenizer else self._path / "tokenizer"

    def _router_config(self) -> RouterConfig:
        own = {
            "tokenizer_path": str(self._tokenizer_path),
            "shard_uds_path": self._uds_path,
            "num_shard": self._plan.num_shards,
            "max_sequence_length": self._plan.max_sequence_length,
            # Without one the router looks further; without an endpoint there is nothing to name.
            "otlp_service_name": self._config.otlp_service_name if self._config.otlp_endpoint else None,
        }
        return _derive(RouterConfig, self._config, own)

    def _shard_config(self, rank: int) -> ShardConfig:
        own = {
            "model_path": str(self._plan.model_path),
            "tokenizer_path": str(self._tokenizer_path),
            "uds_path": self._uds_path,
            "rank": rank,
            "world_size": self._plan.num_shards,
            "rendezvous": str(self._path / f"rendezvous-{self._epoch}"),
            "kernel_cache": str(self._path / "kernels"),
            "epoch": self._epoch,
            "heartbeat_fd": None,  # each child's own
            "dtype": self._plan.dtype,
            "deployment_framework": ENGINES.get(self._config.deployment_framework or ""),
            "max_sequence_length": self._plan.max_sequence_length,
            **asdict(self._plan.tuning),
        }
        return _derive(ShardConfig, self._config, own)


def _derive(config_type: type[C], config: LauncherConfig, own: Mapping[str, Any]) -> C:
    """`own` values, and for the rest the launcher's options of the same name; defaults where it has none."""
    names = {f.name for f in fields(config_type)} & {f.name for f in fields(config)} - own.keys()
    shared = {name: getattr(config, name) for name in names}
    return config_type(**shared, **own)
