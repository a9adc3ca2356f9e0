"""Connections between the launchers of two nodes: of a node other than node 0, and of one that hangs."""

import asyncio
import json
import socket
import ssl
import sys
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.support.link_files import LinkFiles
from tgis.config.model import AdapterOptions
from tgis.config.processes import LauncherConfig
from tgis.launcher.child_configs import Start
from tgis.launcher.nodes import remote_nodes
from tgis.launcher.nodes.follower import Follower
from tgis.launcher.nodes.local_node import ShardEndedError
from tgis.launcher.nodes.remote_nodes import RemoteNodes
from tgis.launcher.nodes.shard_process import ShardProcesses
from tgis.launcher.plan import Plan
from tgis.net.tls import link_certificates, mutual_client_context, mutual_server_context

HOST = "127.0.0.1"


def make_config(directory: Path, port: int) -> LauncherConfig:
    files = LinkFiles(directory).write(trustme.CA(), HOST)
    cert, key, ca = (str(files.path(name)) for name in ("cert", "key", "ca"))
    return LauncherConfig(
        model_name="not looked up",
        nnodes=2,
        node_rank=1,
        master_addr=HOST,
        master_port=port,
        bind=HOST,
        port=0,
        device="cpu",
        link_cert_path=cert,
        link_key_path=key,
        link_ca_cert_path=ca,
    )


def make_plan(path: Path) -> Plan:
    return Plan(path, path, 64, None, 1, 0, True, AdapterOptions(), "a fingerprint")


def connect(config: LauncherConfig, hello: dict[str, Any]) -> ssl.SSLSocket:
    """Return the connection of a node that has introduced itself, and then neither reads nor writes."""
    context = link_certificates(config, mutual_client_context).context
    plain = socket.create_connection((HOST, config.master_port))
    connection = context.wrap_socket(plain, server_hostname=HOST)
    connection.sendall(
        json.dumps({"kind": "hello", "node_rank": 1, "addresses": [], **hello}).encode() + b"\n"
    )
    return connection


async def test_a_node_that_hangs_does_not_delay_the_end_of_node_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_nodes, "CLOSE_S", 0.1)
    with socket.create_server((HOST, 0)) as listener:
        config = make_config(tmp_path / "link", listener.getsockname()[1])
        remote = RemoteNodes(1, {}, link_certificates(config, mutual_server_context))
        serving = asyncio.create_task(remote.serve(listener))
        with await asyncio.to_thread(connect, config, {"common": {}}):
            await remote.nodes[0].wait_until_connected()
            serving.cancel()
            await asyncio.wait((serving,))
            await asyncio.wait_for(remote.close(), 10)


async def test_shards_that_cannot_be_started_are_reported_to_node_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, node 0 would wait for them for ever."""
    with socket.create_server((HOST, 0)) as listener:
        config, plan = make_config(tmp_path / "link", listener.getsockname()[1]), make_plan(tmp_path)
        follower = Follower(config, plan, ShardProcesses(config, 1))
        common = follower._configs.common
        remote = RemoteNodes(1, common, link_certificates(config, mutual_server_context))
        monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
        tasks = [asyncio.create_task(each) for each in (remote.serve(listener), follower.run())]
        [node] = remote.nodes
        try:
            async with asyncio.timeout(20):
                await node.wait_until_connected()
                with pytest.raises(ShardEndedError, match="cannot be started: No such file or directory"):
                    await node.start(Start(1, f"{HOST}:1"), None)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await remote.close()
            await follower.close()
