"""Checks the options that a command was given, and applies other servers' option names to them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tgis.config.aliases.alias import Foreign
from tgis.config.model import QUANTIZATIONS_OF_TGIS
from tgis.errors import OperatorError

DEFAULT = "default"
NOT_SERVED = {
    "ibm_fms": "models are not run through IBM FMS",
    "ds_inference": "models are not run through DeepSpeed, and are cut over shards without it",
}
OTHERWISE = (
    "use tgis_native, the service's own engine, or hf_transformers, or leave it out to get whichever knows "
    "the model"
)
RENAMED = {
    "hf_custom_tp": "hf_custom_tp is an older name of tgis_native",
    "hf_accelerate": "hf_accelerate means hf_transformers: --num-shard says how many devices to use",
    "hf_optimum_bt": "hf_optimum_bt counts as unset: BetterTransformer is gone from its library, and "
    "attention is never computed the slow way",
}


class SettingsError(OperatorError):
    """Error when options exclude each other or ask for something that is not served."""


@dataclass(frozen=True)
class Setting:
    """Value of one of the service's own options; `source` is its flag or variable, or `default`."""

    value: Any
    source: str = DEFAULT


@dataclass(frozen=True)
class Given:
    """Foreign name that was given, with its text; `source` is the flag or variable that gave it."""

    foreign: Foreign
    text: str
    source: str


def apply(
    given: Iterable[Given], settings: dict[str, Setting], read: Callable[[str, str, str], Any]
) -> list[str]:
    """Set the options that the given foreign names mean; return the warnings.

    `read` converts (name of the service's own option, text, source) to a value. Raises SettingsError."""
    warnings: list[str] = []
    for one in given:
        foreign = one.foreign
        if foreign.refused:
            raise SettingsError(f"{one.source}: {foreign.why}")
        if foreign.means is None:
            if refusal := foreign.refusal_of and foreign.refusal_of(one.text):
                raise SettingsError(refusal)
            warnings.append(f"{one.source} has no effect: {foreign.why}")
        elif text := _convert(one):
            settings[foreign.means] = _agreed(
                settings[foreign.means], Setting(read(foreign.means, text, one.source), one.source)
            )
    return warnings


def _convert(one: Given) -> str:
    if one.foreign.convert is None:
        return one.text
    try:
        return one.foreign.convert(one.text)
    except ValueError as error:
        raise SettingsError(f"{one.source}: {one.text!r} cannot be used: {error}") from error


def _agreed(ours: Setting, theirs: Setting) -> Setting:
    """Return the setting that was given. Raises SettingsError if both are given and differ."""
    if ours.source == DEFAULT or ours.value == theirs.value:
        return theirs if ours.source == DEFAULT else ours
    values = f"({ours.value} and {theirs.value})"
    raise SettingsError(f"{ours.source} and {theirs.source} are given with different values {values}")


def check(settings: Mapping[str, Setting]) -> list[str]:
    """Check the options of any command; return the warnings. Raises SettingsError."""
    values = {name: setting.value for name, setting in settings.items()}
    _check_ports(values)
    _check_tls(values)
    _check_link(settings)
    if (method := values.get("quantize")) in QUANTIZATIONS_OF_TGIS:
        raise SettingsError(
            f"{settings['quantize'].source}: {method} weights are not served by this version: give the "
            "unquantized checkpoint, and --quantize int8 for weights in 8 bits"
        )
    return _check_framework(values.get("deployment_framework"))


def _check_ports(values: Mapping[str, Any]) -> None:
    if "bind" in values and not values["bind"].strip():
        raise SettingsError("bind: there is no address; 0.0.0.0 means all of them")
    is_public = "grpc_port" in values and not values.get("headless") and not values.get("node_rank")
    if is_public and values["port"] == values["grpc_port"] != 0:
        raise SettingsError(f"port and grpc_port are both {values['port']}: HTTP and gRPC need a port each")


def _check_tls(values: Mapping[str, Any]) -> None:
    has_cert, has_key = bool(values.get("tls_cert_path")), bool(values.get("tls_key_path"))
    if has_cert != has_key:
        raise SettingsError("tls: must provide both cert and key")
    if values.get("tls_client_ca_cert_path") and not has_cert:
        raise SettingsError("tls: cannot provide client ca cert without keypair")
    if values.get("http_tls") and not has_cert:
        raise SettingsError("tls: --http-tls needs --tls-cert-path and --tls-key-path")


def _check_link(settings: Mapping[str, Setting]) -> None:
    values = {name: setting.value for name, setting in settings.items()}
    files = [values.get(f"link_{name}_path") for name in ("cert", "key", "ca_cert")]
    addresses = values.get("shard_addresses") or values.get("listen_address")
    spans = values.get("nnodes", 1) > 1 or values.get("headless")
    if (addresses or spans) and not all(files):
        raise SettingsError("link: TCP needs cert, key and ca cert")
    # A launcher may have them for a group that has only one node now.
    if any(files) and not addresses and "nnodes" not in values:
        raise SettingsError("link: cert, key and ca cert are for TCP, and no address is given")
    count = settings.get("num_shard")
    is_list = bool(addresses) and "/" not in str(addresses)
    if is_list and count and count.source != DEFAULT and count.value != str(addresses).count(",") + 1:
        raise SettingsError(f"link: {count.value} shards need as many addresses")
    if values.get("node_rank", 0) >= values.get("nnodes", 1):
        raise SettingsError(f"node_rank {values['node_rank']} is out of range for {values['nnodes']} nodes")


def _check_framework(name: str | None) -> list[str]:
    if name in NOT_SERVED:
        raise SettingsError(f"deployment framework {name}: {NOT_SERVED[name]}; {OTHERWISE}")
    return [RENAMED[name]] if name in RENAMED else []
