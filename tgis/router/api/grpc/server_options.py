"""Limits the connections to the public gRPC port by arguments of gRPC's core: sizes, times and rates. None of
them ends a call that has begun."""

from tgis.config.option import LARGEST
from tgis.config.processes import RouterConfig
from tgis.router.api.open_files import share_files

# Streams per connection. Without this limit, repeated resets starve other connections. gRPC counts a stream
# until its call is freed, and refuses further streams even from clients that keep to the limit. The limit
# must therefore exceed the needs of any client.
MAX_STREAMS = 1024
# Maximum number of calls that wait to be accepted. Beyond its default of a thousand, gRPC drops calls at
# random, whichever client sent them.
MAX_PENDING = 10  # multiple of the streams of a connection
# limit for connections that send nothing; gRPC's default of two minutes occupies a place for too long
HANDSHAKE_S = 10
# minimum time between two pings without a call; clients that watch their connections ping every 30 s
MIN_PING_S = 10


def grpc_options(config: RouterConfig) -> list[tuple[str, int]]:
    metadata = config.max_metadata_bytes
    streams = max(MAX_STREAMS, 2 * config.max_concurrent_requests)
    answer_ms = _to_ms(config.keepalive_time / 3)
    options = [
        # A second server on the port must fail. If workers share the port, the launcher keeps it for them.
        ("grpc.so_reuseport", int(config.shares_ports)),
        ("grpc.max_concurrent_streams", streams),
        ("grpc.server.max_pending_requests", MAX_PENDING * streams),
        ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING * streams),
        ("grpc.max_allowed_incoming_connections", share_files(config).grpc),
        ("grpc.server_handshake_timeout_ms", 1000 * HANDSHAKE_S),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        # Set both limits, because gRPC refuses calls at random between a lower soft limit and the hard one.
        ("grpc.max_metadata_size", metadata),
        ("grpc.absolute_max_metadata_size", metadata),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 1000 * MIN_PING_S),
        # A client that lost its network closes nothing, and would occupy its resources for hours.
        ("grpc.keepalive_time_ms", _to_ms(config.keepalive_time)),
        ("grpc.keepalive_timeout_ms", answer_ms),
        ("grpc.http2.ping_timeout_ms", answer_ms),  # gRPC's default is one minute
    ]
    if (age_s := config.connection_age) is not None:  # gRPC's default grace is infinite: streams finish
        options.append(("grpc.max_connection_age_ms", _to_ms(age_s)))
    return options


def _to_ms(seconds: float) -> int:
    """Return the milliseconds. Times above 24 days become the largest number, which gRPC reads as never."""
    return min(round(1000 * seconds), LARGEST)
