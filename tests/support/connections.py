"""Clients' connections as seen by the serving processes."""

from pathlib import Path

import psutil

OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
"""Options of a gRPC channel that does not share its connection."""
ESTABLISHED, NO_INODE = "01", "0"


def count_connections(pid: int, *ports: int) -> int:
    """Return the number of client connections to these ports that a process has accepted."""
    result = psutil.Process(pid).net_connections("tcp")
    return sum(each.laddr.port in ports and each.status == psutil.CONN_ESTABLISHED for each in result)


def find_waiting(*ports: int) -> set[str]:
    """Return the addresses of clients whose connections to these ports have not been accepted."""
    tables = (Path("/proc/net") / name for name in ("tcp", "tcp6"))
    rows = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    ends = tuple(f":{port:04X}" for port in ports)
    return {
        remote
        for _, local, remote, state, *_, inode in (row[:10] for row in rows)
        if local.endswith(ends) and (state, inode) == (ESTABLISHED, NO_INODE)
    }
