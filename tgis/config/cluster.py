"""Declares the options of a shard group: those of its nodes and those of each rank."""

from dataclasses import dataclass

from tgis.config.option import Group, in_group, option


@in_group(Group.NODES)
@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    nnodes: int = option(
        "Nodes that run the model's shards, the same number each.", 1, older_env="LWS_GROUP_SIZE", minimum=1
    )
    node_rank: int = option(
        "Which of the nodes this is; the router is on node 0.", 0, older_env="LWS_WORKER_INDEX", minimum=0
    )
    master_addr: str = option(
        "Address of node 0, as the other nodes know it.", "localhost", older_env="LWS_LEADER_ADDRESS"
    )
    master_port: int = option(
        "Port on which node 0 waits for the launchers of the other nodes. The shards use the ports after it, "
        "two for each rank.",
        29500,
        minimum=1,
        maximum=65534,
    )
    headless: bool = option("Run shards only, for a router elsewhere, as all nodes but node 0 do.", False)


@in_group(Group.NODES)
@dataclass(frozen=True, kw_only=True)
class RankOptions:
    rank: int = option("Which shard of the group this is.", 0, minimum=0)
    world_size: int = option("Number of shards in the group.", 1, minimum=1)
    local_rank: int | None = option(
        "Which shard of this machine this is; unset: all are on one machine.", None, env=False, minimum=0
    )
    local_size: int | None = option("Shards on this machine; unset: all.", None, env=False, minimum=1)
    node_address: str | None = option(
        "Address at which other ranks reach this one; unset: loopback.", None, env=False
    )
    rendezvous: str | None = option(
        "File, or HOST:PORT of rank 0, through which the ranks of one start of the group meet.",
        None,
        env=False,
    )
    rendezvous_fd: int | None = option(
        "Open file descriptor of the socket that listens there, for rank 0.", None, env=False, minimum=0
    )
    epoch: int = option("Which start of the group this is.", 0, env=False, minimum=0, group=Group.LIFECYCLE)
