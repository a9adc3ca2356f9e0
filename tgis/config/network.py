"""Declares the options of connections: public ports, health probe, and links between router and shards."""

from dataclasses import dataclass

from tgis.config.option import Group, in_group, option


def split_names(names: str | None) -> tuple[str, ...]:
    """Return the names in a list separated by commas, without empty ones."""
    stripped = (name.strip() for name in (names or "").split(","))
    return tuple(name for name in stripped if name)


@in_group(Group.NETWORK)
@dataclass(frozen=True, kw_only=True)
class PortOptions:
    bind: str = option("Address on which the public ports listen.", "0.0.0.0")
    port: int = option(
        "HTTP port, for health and metrics; 0 chooses a free port.",
        3000,
        short="-p",
        minimum=0,
        maximum=65535,
    )
    grpc_port: int = option(
        "Public gRPC port; 0 chooses a free port.", 8033, short="-g", minimum=0, maximum=65535
    )
    tls_cert_path: str | None = option(
        "PEM file of the gRPC port's certificate; needs --tls-key-path; unset: no TLS.", None, group=Group.TLS
    )
    tls_key_path: str | None = option(
        "PEM file of the certificate's private key; needs --tls-cert-path.", None, group=Group.TLS
    )
    tls_client_ca_cert_path: str | None = option(
        "PEM file of the CA certificates that client certificates are verified against; if set, clients must "
        "present a certificate; unset: clients need none.",
        None,
        group=Group.TLS,
    )
    grpc_api: str = option(
        "APIs served over gRPC, separated by commas: fmaas, vllm-engine.",
        "fmaas",
    )
    kv_events_endpoint: str | None = option(
        "ZMQ address, such as tcp://127.0.0.1:5557, at which changes of the prefix cache are published in "
        "vLLM's form to everyone who can connect; unset: nowhere.",
        None,
    )
    kv_events_replay_endpoint: str | None = option(
        "ZMQ address at which subscribers of --kv-events-endpoint ask for batches that they have missed; "
        "unset: none.",
        None,
    )
    kv_events_topic: str | None = option(
        "Topic of the batches of --kv-events-endpoint; unset: an empty topic.", None
    )
    http_api: str | None = option(
        "APIs served over HTTP beside gRPC, separated by commas: openai, tgi, lmi; tgi and lmi include "
        "openai; unset: none.",
        None,
    )
    http_api_port: int | None = option(
        "Port of the APIs of --http-api, with the TLS settings of the gRPC port; 0 chooses a free port; "
        "unset: the HTTP port.",
        None,
        minimum=0,
        maximum=65535,
    )
    max_http_connections: int = option(
        "Maximum number of active HTTP API connections per router worker.",
        1024,
        minimum=1,
        group=Group.LIMITS,
    )
    cors_allow_origin: str | None = option(
        "Origins, separated by commas, whose pages may call the HTTP APIs from a browser; their hosts are "
        "also accepted in the Host header on loopback without tokens; * means all; unset: none.",
        None,
        group=Group.TLS,
    )
    playground: bool = option(
        "Serve a chat page for browsers at /playground; it needs --http-api openai.",
        False,
    )
    http_tls: bool = option(
        "Serve the HTTP port with the gRPC port's certificate; its clients need no certificate.",
        False,
        group=Group.TLS,
    )
    auth_tokens_path: str | None = option(
        "File of bearer tokens, one per line, as TOKEN, `tenant NAME TOKEN` or `operator TOKEN`; every call "
        "must send one of them; unset: calls need no token. Lines `limits NAME` set limits of tenants.",
        None,
        group=Group.TLS,
    )
    trust_metadata: str | None = option(
        "Metadata key over gRPC, and header over HTTP, in which a gateway names the tenant of a call; every "
        "client that reaches the ports is trusted with it. Unset: none.",
        None,
        group=Group.TLS,
    )
    max_message_bytes: int = option(
        "Maximum size of a request, in bytes.", 4 << 20, minimum=1, group=Group.LIMITS
    )
    max_metadata_bytes: int = option(
        "Maximum size of a gRPC call's metadata, in bytes; each entry counts 32 bytes more.",
        32 << 10,
        minimum=1,
        group=Group.LIMITS,
    )
    max_connection_age: float | None = option(
        "Time, in seconds, after which clients are asked to reconnect: over gRPC plus or minus 10 %, over "
        "HTTP with the next response. Running streams finish first. Unset: 600 with several router workers, "
        "to spread connections over them; never with one.",
        None,
        minimum=0.1,
    )
    slow_reader_timeout: float = option(
        "Maximum time, in seconds, that a response waits for a client that does not read; then the call is "
        "ended.",
        60.0,
        minimum=0.1,
    )
    keepalive_time: float = option(
        "Idle time, in seconds, after which a client is pinged; the connection is closed if no reply arrives "
        "within a third of this time.",
        60.0,
        minimum=1,
    )


@in_group(Group.NODES)
@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    link_cert_path: str | None = option(
        "PEM file of this process's certificate, for TCP links between nodes, router and shards.", None
    )
    link_key_path: str | None = option("PEM file of the private key of --link-cert-path.", None)
    link_ca_cert_path: str | None = option(
        "PEM file of the CA certificates that peers on these links are verified against.", None
    )
    link_server_name: str | None = option(
        "Host name expected in the certificates of servers on these links; unset: the host of their address.",
        None,
    )


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """Options of `health-probe`, which reads the same variables as the service to learn its address."""

    live: bool = option(
        "Request /live, which only checks that the process responds, instead of /health.", False, env=False
    )
    bind: str = option(
        "Address on which the service listens; for an address such as 0.0.0.0, loopback is probed.", "0.0.0.0"
    )
    port: int = option("HTTP port of the service.", 3000, short="-p", minimum=1, maximum=65535)
    http_tls: bool = option("Connect with TLS; the service's certificate is not verified.", False)
    timeout: float = option(
        "Maximum time, in seconds, to wait for the response.", 4.0, env=False, minimum=0.01, maximum=3600
    )
