"""An engine on every rank of a group, driven on the first: what that one executes, the others do too."""

from pathlib import Path

import torch

from tests.shard.driver import Request, Router, configure
from tgis.pb import shard_pb2 as pb
from tgis.shard.engine import Engine
from tgis.shard.loading import load
from tgis.shard.world import World


class Relay:
    """The first rank's engine, as far as a driver needs one."""

    def __init__(self, engine: Engine, world: World) -> None:
        self.info, self._engine, self._world = engine.info, engine, world
        self.digests: list[int] = []

    def execute(self, request: pb.StepRequest) -> pb.StepResponse:
        share(self._world, request.SerializeToString())
        response = self._engine.execute(request)
        self.digests.append(response.digest)
        return response


def serve(
    world: World, directory: Path, seed: int, crowds: list[list[Request]], block_size: int
) -> tuple[list[list[Request]], list[int]]:
    """Answers the crowds one after the other. The requests with what was generated, on the first rank; and
    the digests of all steps."""
    options = {"rank": world.rank, "world_size": world.size, "block_size": block_size}
    engine = load(configure(directory, kv_cache_tokens=2048, dtype="float32", **options), world)
    if world.rank:
        return [], list(_follow(world, engine))
    relay = Relay(engine, world)
    for number, crowd in enumerate(crowds):
        engine.reset()
        Router(relay, seed + number).run(list(crowd))  # type: ignore[arg-type]
    share(world, b"")
    return crowds, relay.digests


def _follow(world: World, engine: Engine) -> list[int]:
    digests = []
    while payload := share(world, b""):
        digests.append(engine.execute(pb.StepRequest.FromString(payload)).digest)
    return digests


def share(world: World, payload: bytes) -> bytes:
    """The first rank's payload, on every rank."""
    if world.size == 1:
        return payload
    size = int(world.all_gather(torch.tensor([len(payload)]))[0])
    mine = torch.zeros(size, dtype=torch.uint8)
    mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else mine[:0]
    return bytes(world.all_gather(mine)[:size].tolist())
