"""Shares the process's limit of open files among the connections of its ports."""

import resource
from typing import NamedTuple

from tgis.config.processes import RouterConfig
from tgis.net.http.routes import PROBE_LIMITS

MAX_GRPC = 4096
RESERVED = 256  # files for everything but connections to an API: probes, shards, the tokenizer, logs
FRESH = 4  # HTTP connections without a request for each connection with one


class ConnectionShares(NamedTuple):
    grpc: int
    http_fresh: int
    """HTTP connections on an API's port that have not sent a whole header yet."""
    num_missing: int = 0
    """Number of files that the ports' limits exceed the process's limit by."""


def share_files(config: RouterConfig) -> ConnectionShares:
    """Return the connection limits of the ports. They leave enough files for everything else. An HTTP API
    gets places for its requests and the same number for idle connections. gRPC gets at least half of the
    files."""
    few = PROBE_LIMITS.max_connections
    requests = 2 * config.max_http_connections
    max_fresh = few + FRESH * config.max_http_connections
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files == resource.RLIM_INFINITY:
        return ConnectionShares(MAX_GRPC, max_fresh)
    spare = max(num_files - RESERVED, num_files // 2)
    if not config.http_api:
        return ConnectionShares(min(MAX_GRPC, spare), few)
    for_http = max(spare - MAX_GRPC, spare // 2)
    fresh = min(max(for_http - requests, few), max_fresh)
    grpc = min(MAX_GRPC, max(spare - requests - fresh, spare // 2))
    return ConnectionShares(grpc, fresh, max(grpc + requests + fresh - spare, 0))
