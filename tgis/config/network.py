"""Declares the options of connections: public ports, health probe, and links between router and shards."""

from dataclasses import dataclass

from tgis.config.option import Group, in_group, option


@in_group(Group.NETWORK)
@dataclass(frozen=True, kw_only=True)
class PortOptions:
    bind: str = option("Address the public ports listen on.", "0.0.0.0")
    port: int = option(
        "HTTP port: health and metrics; 0 takes a free one.", 3000, short="-p", minimum=0, maximum=65535
    )
    grpc_port: int = option(
        "Public gRPC port; 0 takes a free one.", 8033, short="-g", minimum=0, maximum=65535
    )
    tls_cert_path: str | None = option(
        "PEM file of the gRPC port's certificate; needs --tls-key-path.", None, group=Group.TLS
    )
    tls_key_path: str | None = option(
        "PEM file of its private key; needs --tls-cert-path.", None, group=Group.TLS
    )
    tls_client_ca_cert_path: str | None = option(
        "PEM file of clients' authorities; if set, clients must show a certificate.", None, group=Group.TLS
    )
    http_api: str | None = option(
        "APIs served over HTTP beside gRPC, separated by commas: openai, tgi, lmi, of which each serves "
        "OpenAI's too; unset: none.",
        None,
    )
    http_api_port: int | None = option(
        "Port of these APIs, with the gRPC port's certificates and authorities; 0 takes a free one; unset: "
        "the HTTP port.",
        None,
        minimum=0,
        maximum=65535,
    )
    max_http_connections: int = option(
        "Most connections with a request to these APIs, in each router worker.",
        1024,
        minimum=1,
        group=Group.LIMITS,
    )
    cors_allow_origin: str | None = option(
        "Origins, separated by commas, whose pages may call these APIs from a browser and whose hosts may "
        "be named on loopback without tokens; * means all; unset: none.",
        None,
        group=Group.TLS,
    )
    playground: bool = option(
        "Serve a page at /playground that chats with the model in a browser; it needs --http-api openai.",
        False,
    )
    http_tls: bool = option(
        "Serve the HTTP port with the gRPC port's certificate too; its clients need none.",
        False,
        group=Group.TLS,
    )
    auth_tokens_path: str | None = option(
        "File of bearer tokens, each on a line of its own, as TOKEN or as `tenant NAME TOKEN`; a call must "
        "send one of them; unset: calls need no token.",
        None,
        group=Group.TLS,
    )
    max_message_bytes: int = option("Bytes of the largest request.", 4 << 20, minimum=1, group=Group.LIMITS)
    max_metadata_bytes: int = option(
        "Bytes of a call's metadata, plus 32 for each entry.", 32 << 10, minimum=1, group=Group.LIMITS
    )
    max_connection_age: float | None = option(
        "Seconds after which a connection is asked to reconnect: over gRPC give or take a tenth, over HTTP "
        "with its next answer. Its streams finish first. Unset: 600 with several router workers, which "
        "spreads connections anew; never with one.",
        None,
        minimum=0.1,
    )
    slow_reader_timeout: float = option(
        "Seconds that an answer waits for a client that does not read it; then the call ends.",
        60.0,
        minimum=0.1,
    )
    keepalive_time: float = option(
        "Seconds of silence after which a client is pinged; it is lost if it is silent for a third more.",
        60.0,
        minimum=1,
    )


@in_group(Group.NODES)
@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    link_cert_path: str | None = option(
        "PEM file of this end's certificate, for links over TCP between nodes, router and shards.", None
    )
    link_key_path: str | None = option("PEM file of its private key.", None)
    link_ca_cert_path: str | None = option("PEM file of the other end's authorities.", None)
    link_server_name: str | None = option(
        "Name in the certificate of the server connected to; unset: the host of its address.", None
    )


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """Options of `health-probe`, which finds the service by the variables that the service itself reads."""

    live: bool = option("Ask /live, whether the process answers, instead of /health.", False, env=False)
    bind: str = option(
        "Address the service listens on; one that means all of them means loopback.", "0.0.0.0"
    )
    port: int = option("Its HTTP port.", 3000, short="-p", minimum=1, maximum=65535)
    http_tls: bool = option("It serves that port with TLS; its certificate is not verified.", False)
    timeout: float = option(
        "Seconds after which the service counts as not answering.", 4.0, env=False, minimum=0.01, maximum=3600
    )
