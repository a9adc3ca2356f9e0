"""Limits on connections to the public gRPC port, as arguments of gRPC's core: sizes, times and rates. None of
them ends a call that has begun."""

from tgis.config.option import LARGEST
from tgis.config.processes import RouterConfig
from tgis.router.api.open_files import share_files

# Streams per connection; without this limit, repeated resets starve other connections. gRPC counts a stream
# until its call is freed, and refuses further streams even from clients that keep to the limit, so it must
# exceed what any client needs.
MAX_STREAMS = 1024
# Calls that have not been accepted yet. Beyond gRPC's own limit of a thousand, it drops calls at random, any
# client's.
MAX_PENDING = 10  # times the streams of a connection
# limit for connections that say nothing; gRPC's default of two minutes holds a place for too long
HANDSHAKE_S = 10
# least time between two pings without a call; clients that watch their connections ping every 30 s
MIN_PING_S = 10


def grpc_options(config: RouterConfig) -> list[tuple[str, int]]:
    metadata, streams = config.max_metadata_bytes, max(MAX_STREAMS, 2 * config.max_concurrent_requests)
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
        # Set both limits: between a lower soft limit and the hard one, gRPC refuses calls at random.
        ("grpc.max_metadata_size", metadata),
        ("grpc.absolute_max_metadata_size", metadata),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 1000 * MIN_PING_S),
        # A client whose network is gone closes nothing, and would keep its resources for hours.
        ("grpc.keepalive_time_ms", _to_ms(config.keepalive_time)),
        ("grpc.keepalive_timeout_ms", answer_ms),
        ("grpc.http2.ping_timeout_ms", answer_ms),  # otherwise gRPC uses a minute
    ]
    if (age_s := config.connection_age) is not None:  # gRPC's own grace is infinite: streams finish
        options.append(("grpc.max_connection_age_ms", _to_ms(age_s)))
    return options


def _to_ms(seconds: float) -> int:
    """Return the milliseconds; for more than 24 days the largest number, by which gRPC means never."""
    return min(round(1000 * seconds), LARGEST)
