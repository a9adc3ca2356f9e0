"""Ranks of a model: which of them are on this machine, and how they connect."""

import logging
from dataclasses import replace

import torch

from tgis.config.processes import ShardConfig
from tgis.shard import collectives
from tgis.shard.collectives import LOOPBACK, OpenLocal, ProcessGroup, ProcessGroupError, RendezvousPoint

logger = logging.getLogger(__name__)

# Maximum time that a rank waits for another rank that is still reading its weights.
RENDEZVOUS_TIMEOUT_S = 600.0


def find_local_rank(config: ShardConfig) -> int:
    """Return the number of this rank among those of its machine."""
    return config.rank if config.local_rank is None else config.local_rank


def count_local(config: ShardConfig) -> int:
    """Return the number of ranks on this machine."""
    return config.local_size or config.world_size


def connect(config: ShardConfig, device: torch.device, open_local: OpenLocal | None) -> ProcessGroup:
    """Connect to the other ranks. `open_local` opens faster collectives of ranks that are on one machine.
    Raises ProcessGroupError."""
    if config.world_size == 1:
        return ProcessGroup(0, 1, device=device)
    if config.rendezvous is None:
        raise ProcessGroupError("several ranks need a rendezvous address")
    point = RendezvousPoint(config.rendezvous, config.node_address or LOOPBACK, config.rendezvous_fd)
    ranks = (config.rank, config.world_size)
    group = collectives.connect(*ranks, point, RENDEZVOUS_TIMEOUT_S, device, open_local)
    if open_local is not None and config.rank == 0:
        where = "through gloo, because they share no memory" if group.local is None else "in shared memory"
        logger.info("the ranks exchange activations %s", where)
    return replace(group, num_on_host=count_local(config))
