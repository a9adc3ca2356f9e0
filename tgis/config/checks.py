"""Checks the options given to a command, and applies other servers' option names to them."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tgis.config.aliases.alias import Alias
from tgis.config.cuda_graphs import parse_graph_sizes
from tgis.config.model import ENGINES_NOT_SERVED
from tgis.config.network import split_names
from tgis.errors import OperatorError

T = TypeVar("T")

DEFAULT = "default"
METADATA_KEY = re.compile("[a-z0-9._-]+")
SET_KEYS = {
    "authorization",
    "user-agent",
    "connection",
    "content-length",
    "content-type",
    "host",
    "te",
    "transfer-encoding",
    "upgrade",
}
"""Keys that clients, proxies and the protocols set themselves."""
ZMQ_ADDRESS = re.compile(r"ipc://[!-~]+|tcp://[!-~]+:([0-9]{1,5})")
MAX_PORT = 65535
OTHER_ENGINES = (
    "use tgis_native, the service's own engine, or hf_transformers, or leave the option out to let the "
    "service choose"
)
RENAMED = {
    "hf_custom_tp": "hf_custom_tp is an older name of tgis_native",
    "hf_accelerate": "hf_accelerate means hf_transformers: --num-shard sets the number of devices",
    "hf_optimum_bt": "hf_optimum_bt counts as unset: BetterTransformer no longer exists, and attention is "
    "fast without it",
}


class SettingsError(OperatorError):
    """Error for options that exclude each other, or for a value that is not supported."""


@dataclass(frozen=True)
class Setting:
    """Value of one of the service's own options; `source` is its flag or variable, or `default`."""

    value: Any
    source: str = DEFAULT


@dataclass(frozen=True)
class GivenAlias:
    """Alias that was given, with its value as text. `source` is the flag or variable that gave it."""

    alias: Alias
    text: str
    source: str


def apply_aliases(
    given: Iterable[GivenAlias], settings: dict[str, Setting], read: Callable[[str, str, str], Any]
) -> list[str]:
    """Set the options that the given aliases stand for; return the warnings.

    `read` converts (name of the service's own option, text, source) to a value. Raises SettingsError."""
    warnings: list[str] = []
    for one in given:
        alias = one.alias
        if alias.refused:
            raise SettingsError(f"{one.source}: {alias.why}")
        if refusal := alias.refusal_of and alias.refusal_of(one.text):
            raise SettingsError(refusal)
        if alias.means is None:
            warnings.append(f"{one.source} has no effect: {alias.why}")
        elif text := _convert(one):
            other = Setting(read(alias.means, text, one.source), one.source)
            own = settings[alias.means]
            if alias.replaces_into and own.source != DEFAULT:
                apply_defaults({alias.replaces_into: own.value}, settings, own.source)
                own = Setting(None)
            settings[alias.means] = _merge(own, other)
            apply_defaults(dict(alias.also), settings, one.source)
        if alias.convert_more is not None:
            for name, text in _read(one, alias.convert_more).items():
                other = Setting(read(name, text, one.source), one.source)
                settings[name] = _merge(settings[name], other)
    return warnings


def apply_defaults(defaults: Mapping[str, object], settings: dict[str, Setting], source: str) -> None:
    """Set those of these options that were not given."""
    for name, value in defaults.items():
        if settings[name].source == DEFAULT:
            settings[name] = Setting(value, source)


def _convert(one: GivenAlias) -> str:
    return one.text if one.alias.convert is None else _read(one, one.alias.convert)


def _read(one: GivenAlias, convert: Callable[[str], T]) -> T:
    try:
        return convert(one.text)
    except ValueError as error:
        raise SettingsError(f"{one.source}: {one.text!r} cannot be used: {error}") from error


def _merge(own: Setting, other: Setting) -> Setting:
    """Return the setting that was given. Raises SettingsError if both were given and differ."""
    if own.source == DEFAULT:
        return other
    if own.value != other.value:
        values = f"({own.value} and {other.value})"
        raise SettingsError(f"{own.source} and {other.source} are given with different values {values}")
    return own


def check(settings: Mapping[str, Setting], http_apis: Sequence[str], grpc_apis: Sequence[str]) -> list[str]:
    """Check the options of any command, given the names of all APIs over HTTP and gRPC; return the warnings.
    Raises SettingsError."""
    values = {name: setting.value for name, setting in settings.items()}
    _check_properties(values)
    _check_ports(values)
    _check_tls(values)
    _check_trusted_key(values.get("trust_metadata"))
    _check_grpc_api(values, grpc_apis)
    _check_kv_events(values)
    _check_http_api(values, http_apis)
    _check_link(values, settings.get("num_shard"))
    _check_graphs(settings.get("cuda_graphs"))
    return [*_check_framework(values.get("deployment_framework")), *_check_rope(values)]


def _check_properties(values: Mapping[str, Any]) -> None:
    for name in ("properties", "strict_config"):
        if values.get(name) and values.get("compat") != "lmi":
            raise SettingsError(f"{name}: this option needs --compat lmi")


def _check_ports(values: Mapping[str, Any]) -> None:
    if "bind" in values and not values["bind"].strip():
        raise SettingsError("bind: the address is empty; 0.0.0.0 means all addresses")
    is_public = "grpc_port" in values and not values.get("headless") and not values.get("node_rank")
    if is_public and values["port"] == values["grpc_port"] != 0:
        raise SettingsError(
            f"port and grpc_port are both {values['port']}: HTTP and gRPC need separate ports"
        )


def _check_trusted_key(key: str | None) -> None:
    if key is None:
        return
    is_reserved = key.startswith(("grpc-", "tgis-")) or key.endswith("-bin") or key in SET_KEYS
    if is_reserved or not METADATA_KEY.fullmatch(key):
        raise SettingsError(
            f"trust_metadata: {key} is not a key of text metadata in lower case that a gateway may use"
        )


def _check_grpc_api(values: Mapping[str, Any], grpc_apis: Sequence[str]) -> None:
    if "grpc_api" not in values:
        return
    names = split_names(values["grpc_api"])
    if not names:
        raise SettingsError(f"grpc_api: it must name at least one of {', '.join(grpc_apis)}")
    _check_names("grpc_api", names, grpc_apis)


def _check_kv_events(values: Mapping[str, Any]) -> None:
    for name in ("kv_events_replay_endpoint", "kv_events_topic"):
        if values.get(name) and not values.get("kv_events_endpoint"):
            raise SettingsError(f"{name}: this option needs --kv-events-endpoint")
    for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
        if (address := values.get(name)) and not _is_zmq_address(address):
            raise SettingsError(f"{name}: an address is tcp://HOST:PORT or ipc://PATH")


def _is_zmq_address(text: str) -> bool:
    """Return True for an address with a valid port; ZMQ would use a port modulo 65536."""
    match = ZMQ_ADDRESS.fullmatch(text)
    return match is not None and 0 < int(match[1] or MAX_PORT) <= MAX_PORT


def _check_names(option: str, names: Sequence[str], allowed: Sequence[str]) -> None:
    for name in names:
        if name not in allowed:
            raise SettingsError(f"{option}: {name} is not one of {', '.join(allowed)}")


def _check_http_api(values: Mapping[str, Any], http_apis: Sequence[str]) -> None:
    names = split_names(values.get("http_api"))
    _check_names("http_api", names, http_apis)
    if values.get("runtime_adapters") and not names:
        raise SettingsError("runtime_adapters: this option needs --http-api")
    port = values.get("http_api_port")
    if port is not None and not names:
        raise SettingsError("http_api_port: this option needs --http-api")
    if values.get("playground") and not names:
        raise SettingsError("playground: its page calls OpenAI's API, which needs --http-api openai")
    if port and port in (values.get("port"), values.get("grpc_port")):
        raise SettingsError(f"http_api_port and another port are both {port}")
    if not names or port is not None:
        return
    if values.get("tls_cert_path") and not values.get("http_tls"):
        raise SettingsError("http_api: with --tls-cert-path, HTTP APIs need --http-tls or --http-api-port")
    if values.get("tls_client_ca_cert_path"):
        raise SettingsError("http_api: with --tls-client-ca-cert-path, HTTP APIs need --http-api-port")


def _check_tls(values: Mapping[str, Any]) -> None:
    if values.get("auth_tokens") and values.get("auth_tokens_path"):
        raise SettingsError("auth_tokens: AUTH_TOKENS and --auth-tokens-path are both set; keep one of them")
    has_cert = bool(values.get("tls_cert_path"))
    has_key = bool(values.get("tls_key_path"))
    if has_cert != has_key:
        raise SettingsError("tls: must provide both cert and key")
    if values.get("tls_client_ca_cert_path") and not has_cert:
        raise SettingsError("tls: cannot provide client ca cert without keypair")
    if values.get("http_tls") and not has_cert:
        raise SettingsError("tls: --http-tls needs --tls-cert-path and --tls-key-path")


def _check_link(values: Mapping[str, Any], num_shard: Setting | None) -> None:
    files = [values.get(f"link_{name}_path") for name in ("cert", "key", "ca_cert")]
    addresses = values.get("shard_addresses") or values.get("listen_address")
    has_nodes = values.get("nnodes", 1) > 1 or values.get("headless")
    if (addresses or has_nodes) and not all(files):
        raise SettingsError("link: TCP needs --link-cert-path, --link-key-path and --link-ca-cert-path")
    # A launcher may be given them even if its group has only one node now.
    if any(files) and not addresses and "nnodes" not in values:
        raise SettingsError("link: cert, key and ca cert are used only over TCP, and no address is given")
    if addresses and "/" not in addresses and num_shard and num_shard.source != DEFAULT:
        num_addresses = addresses.count(",") + 1
        if num_addresses != num_shard.value:
            raise SettingsError(f"link: {num_addresses} addresses are given for {num_shard.value} shards")
    if values.get("node_rank", 0) >= values.get("nnodes", 1):
        raise SettingsError(f"node_rank {values['node_rank']} is out of range for {values['nnodes']} nodes")


def _check_graphs(sizes: Setting | None) -> None:
    if sizes is None:
        return
    try:
        parse_graph_sizes(sizes.value)
    except ValueError as error:
        raise SettingsError(f"{sizes.source}: {error}") from error


def _check_rope(values: Mapping[str, Any]) -> list[str]:
    has_effect = values.get("rope_scaling") != "linear" or (values.get("rope_factor") or 1) > 1
    return [] if has_effect else ["rope_scaling linear has no effect without a rope_factor above 1"]


def _check_framework(name: str | None) -> list[str]:
    if name in ENGINES_NOT_SERVED:
        raise SettingsError(f"deployment framework {name}: {ENGINES_NOT_SERVED[name]}; {OTHER_ENGINES}")
    return [RENAMED[name]] if name in RENAMED else []
