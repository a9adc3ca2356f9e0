"""Shares the files that the process may open among the connections of its ports."""

import resource
from typing import NamedTuple

from tgis.config.processes import RouterConfig
from tgis.net.http_routes import PROBE_LIMITS

MAX_GRPC = 4096
RESERVED = 256  # files for everything that is no connection to an API: probes, shards, the tokenizer, logs
FRESH = 4  # HTTP connections without a request, for each one that may have a request


class ConnectionShares(NamedTuple):
    grpc: int
    http_fresh: int
    """HTTP connections without a whole header, on the port of an API."""
    num_missing: int = 0
    """Number of files that the ports' limits exceed the process's by."""


def share_files(config: RouterConfig) -> ConnectionShares:
    """Return numbers of connections that leave the process files to open for everything else. An API over
    HTTP has places for requests and as many for idle connections, and gRPC has at least half of the files."""
    few, requests = PROBE_LIMITS.max_connections, 2 * config.max_http_connections
    most_fresh = few + FRESH * config.max_http_connections
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files == resource.RLIM_INFINITY:
        return ConnectionShares(MAX_GRPC, most_fresh)
    spare = max(num_files - RESERVED, num_files // 2)
    if not config.http_api:
        return ConnectionShares(min(MAX_GRPC, spare), few)
    for_http = max(spare - MAX_GRPC, spare // 2)
    fresh = min(max(for_http - requests, few), most_fresh)
    grpc = min(MAX_GRPC, max(spare - requests - fresh, spare // 2))
    return ConnectionShares(grpc, fresh, max(grpc + requests + fresh - spare, 0))
