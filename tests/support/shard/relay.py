"""Model runner on every rank of a group, driven on the first: all others execute the same steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.shard.driver import Request, Router, configure
from tgis.pb import shard_pb2 as pb
from tgis.prompts.artifact_cache import ArtifactCache, Kind
from tgis.shard.collectives import ProcessGroup
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.runner.model_runner import ComputedStep
from tgis.shard.startup.load import load


@dataclass(frozen=True)
class Copies:
    """Soft prompts and adapters that all ranks load from `{uds_path}-contents`, where the first rank's store
    puts them."""

    uds_path: str = "unused"
    digests: tuple[str, ...] = ()

    def put(self, kind: Kind, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> "Copies":
        """Return the copies with one more, whose digest is the last."""
        digest = ArtifactCache(Path(f"{self.uds_path}-contents")).put(kind, tensors, about)
        return Copies(self.uds_path, (*self.digests, digest))


class Relay:
    """First rank's model runner, with the interface that a driver needs."""

    def __init__(self, runner: ModelRunner, group: ProcessGroup) -> None:
        self.info, self.max_pending = runner.info, 1
        self._runner, self._group = runner, group
        self.digests: list[int] = []

    def launch(self, request: pb.StepRequest) -> ComputedStep:
        share(self._group, request.SerializeToString())
        response = self._runner.launch(request).answer()
        self.digests.append(response.digest)
        return ComputedStep(response)


def serve(
    group: ProcessGroup,
    directory: Path,
    seed: int,
    crowds: list[list[Request]],
    block_size: int,
    copies: Copies = Copies(),
) -> tuple[list[list[Request]], list[int]]:
    """Answer groups of requests in turn. Return the requests with their tokens, on the first rank, and the
    digests of all steps."""
    options = {"rank": group.rank, "world_size": group.size, "block_size": block_size}
    options |= {"kv_cache_tokens": 2048, "dtype": "float32", "uds_path": copies.uds_path}
    runner = load(configure(directory, **options), group)
    for digest in copies.digests:
        runner.adapters.load(digest)
    if group.rank:
        return [], list(follow(group, runner))
    relay = Relay(runner, group)
    for number, crowd in enumerate(crowds):
        runner.reset()
        Router(relay, seed + number).run(list(crowd))  # type: ignore[arg-type]
    share(group, b"")
    return crowds, relay.digests


def follow(group: ProcessGroup, runner: ModelRunner) -> list[int]:
    """Execute the first rank's steps until it shares an empty one. Return their digests."""
    digests = []
    while payload := share(group, b""):
        digests.append(runner.launch(pb.StepRequest.FromString(payload)).answer().digest)
    return digests


def share(group: ProcessGroup, payload: bytes) -> bytes:
    """Return the first rank's payload on every rank."""
    if group.size == 1:
        return payload
    size = int(group.all_gather(torch.tensor([len(payload)]))[0])
    mine = torch.zeros(size, dtype=torch.uint8)
    mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else mine[:0]
    return bytes(group.all_gather(mine)[:size].tolist())
