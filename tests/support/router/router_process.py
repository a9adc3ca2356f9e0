"""Real router process in front of fake shards."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from tokenizers import Tokenizer

from tests.support.processes import Service
from tests.support.router.fake_shard import VOCAB_SIZE, FakeShard, ShardServer
from tests.support.router.model_of_contents import Library
from tests.support.tokenizers.trained import write_byte_level
from tgis.pb import shard_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

MAX_SEQUENCE_LENGTH = 200
MODULE = os.environ.get("TGIS_TESTS_ROUTER", "tgis")
"""Module that runs routers, unless a test needs its own. test_split_router names another one."""
NUM_WORKERS = {"tgis": 1}.get(MODULE, 3)


@dataclass
class Setup:
    """Router, its shards, and a client of it."""

    service: Service
    shards: list[FakeShard]
    servers: list[ShardServer]
    tokenizer: Tokenizer
    uds_path: str
    library: Library
    stub: GenerationServiceStub = field(init=False)
    channel: grpc.Channel = field(init=False)

    def __post_init__(self) -> None:
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.service.grpc_port}")  # to one worker
        self.stub = GenerationServiceStub(self.channel)

    @property
    def http(self) -> str:
        return self.service.http


def write_usual(directory: Path) -> Tokenizer:
    return write_byte_level(directory, VOCAB_SIZE)


def start_router(
    directory: Path,
    num_shards: int,
    *flags: str,
    write_tokenizer: Callable[[Path], Tokenizer] = write_usual,
    info: pb.InfoResponse | None = None,
    library: Library | None = None,
    module: str | None = None,
) -> Setup:
    """Start a router. `module` runs the router, for tests that need a specific one."""
    tokenizer = write_tokenizer(directory)
    uds_path = str(directory / "shard")
    library = library or Library()
    shards = [FakeShard(rank, 1, info, library, num_shards) for rank in range(num_shards)]
    servers = [ShardServer(shard, uds_path) for shard in shards]
    link = ["--shard-uds-path", uds_path, "--num-shard", str(num_shards)]
    try:
        command = router_command(directory, *link, *flags)
        if module is None:
            service = Service(command, module=MODULE, num_routers=NUM_WORKERS)
        else:
            service = Service(command, module=module, num_routers=1)
        service.wait_until_serving()
    except AssertionError:
        for server in servers:
            server.stop()
        raise
    return Setup(service, shards, servers, tokenizer, uds_path, library)


def router_command(directory: Path, *flags: str) -> list[str]:
    command = ["router", "--tokenizer-path", str(directory), "--bind", "127.0.0.1", "--port", "0"]
    return [*command, "--grpc-port", "0", "--max-sequence-length", str(MAX_SEQUENCE_LENGTH), *flags]


def stop_router(setup: Setup) -> int:
    """Stop the router, which must have released all resources."""
    try:
        return setup.service.end()
    finally:
        stop_shards(setup)


def stop_shards(setup: Setup) -> None:
    setup.channel.close()
    for server in setup.servers:
        server.stop()


def restart_shards(setup: Setup, epoch: int) -> None:
    setup.shards[:] = [
        FakeShard(rank, epoch, None, setup.library, len(setup.shards)) for rank in range(len(setup.shards))
    ]
    setup.servers[:] = [ShardServer(shard, setup.uds_path) for shard in setup.shards]
