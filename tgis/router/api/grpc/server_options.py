"""What the public gRPC port takes from a connection, as arguments of gRPC's core: how much, how long and how
often. None of them ends a call that has begun."""

import resource

from tgis.config.processes import RouterConfig

# Of a connection; without it, resets in a row starve others. gRPC counts a stream until its call is let go of
# and refuses what is beyond, even to clients that keep to the number: it must be more than anybody needs.
MAX_STREAMS = 1024
# Calls that nobody has looked at yet. Past gRPC's own thousand it drops calls at random, anybody's.
MAX_PENDING = 10  # times the streams of a connection
HANDSHAKE_S = 10  # of what connects and says nothing; gRPC's own two minutes hold a place for too long
MIN_PING_S = 10  # between two pings without a call; clients that watch their connections ping every 30 s
MAX_CONNECTIONS = 4096
RESERVED_FILES = 256  # for all that is not a gRPC connection: HTTP, shards, the tokenizer, logs

Options = list[tuple[str, int]]


def grpc_options(config: RouterConfig) -> Options:
    metadata, streams = config.max_metadata_bytes, max(MAX_STREAMS, 2 * config.max_concurrent_requests)
    answer_ms = round(1000 * config.keepalive_time / 3)
    options = [
        ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share it
        ("grpc.max_concurrent_streams", streams),
        ("grpc.server.max_pending_requests", MAX_PENDING * streams),
        ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING * streams),
        ("grpc.max_allowed_incoming_connections", max_connections()),
        ("grpc.server_handshake_timeout_ms", 1000 * HANDSHAKE_S),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        # Both limits: between a lower soft one and the other, gRPC refuses calls at random.
        ("grpc.max_metadata_size", metadata),
        ("grpc.absolute_max_metadata_size", metadata),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 1000 * MIN_PING_S),
        # A client whose network is gone says nothing, and would keep what it has for hours.
        ("grpc.keepalive_time_ms", round(1000 * config.keepalive_time)),
        ("grpc.keepalive_timeout_ms", answer_ms),
        ("grpc.http2.ping_timeout_ms", answer_ms),  # without it a minute counts
    ]
    if config.max_connection_age is not None:  # the grace is gRPC's own, without end: streams finish
        options.append(("grpc.max_connection_age_ms", int(1000 * config.max_connection_age)))
    return options


def max_connections() -> int:
    """So many that the process keeps files to open for everything else."""
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(num_files - RESERVED_FILES, num_files // 2))
