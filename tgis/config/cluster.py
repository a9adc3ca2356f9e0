"""Declares the options of a shard group: those of its nodes and those of each rank."""

from dataclasses import dataclass

from tgis.config.option import Group, in_group, option


@in_group(Group.NODES)
@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    nnodes: int = option(
        "Number of nodes that run the model's shards; each runs the same number of shards.",
        1,
        older_env="LWS_GROUP_SIZE",
        minimum=1,
    )
    node_rank: int = option(
        "Index of this node, from 0; node 0 runs the router.", 0, older_env="LWS_WORKER_INDEX", minimum=0
    )
    master_addr: str = option(
        "Address at which the other nodes reach node 0.", "localhost", older_env="LWS_LEADER_ADDRESS"
    )
    master_port: int = option(
        "Port on which node 0 accepts the launchers of the other nodes. The shards use the ports after it, "
        "two per rank.",
        29500,
        minimum=1,
        maximum=65534,
    )
    headless: bool = option(
        "Run only shards, for a router on another machine; nodes other than 0 always do.", False
    )


@in_group(Group.NODES)
@dataclass(frozen=True, kw_only=True)
class RankOptions:
    rank: int = option("Index of this shard in the group.", 0, minimum=0)
    world_size: int = option("Number of shards in the group.", 1, minimum=1)
    local_rank: int | None = option(
        "Index of this shard on this machine; unset: all shards are on one machine.",
        None,
        env=False,
        minimum=0,
    )
    local_size: int | None = option(
        "Number of shards on this machine; unset: all.", None, env=False, minimum=1
    )
    node_address: str | None = option(
        "Address at which other ranks reach this one; unset: loopback.", None, env=False
    )
    rendezvous: str | None = option(
        "File, or HOST:PORT of rank 0, through which the ranks form their process group.",
        None,
        env=False,
    )
    rendezvous_fd: int | None = option(
        "Open file descriptor of rank 0's socket that listens at --rendezvous.", None, env=False, minimum=0
    )
    epoch: int = option(
        "Sequence number of this start of the group.", 0, env=False, minimum=0, group=Group.LIFECYCLE
    )
