"""Reads the address of a service."""

import re

from tgis_client.errors import SettingsError

DEFAULT_PORT = 8033
DEFAULT_TARGET = f"localhost:{DEFAULT_PORT}"

_OTHER_NAMES = re.compile("(dns|unix|unix-abstract|vsock|ipv4|ipv6|xds|google-c2p):")
"""Begin of gRPC's names of addresses with a scheme."""
_PLAIN = re.compile(r"(?P<host>\[[^\[\]]+\]|[^:/\[\]\s]+)(:(?P<port>[0-9]+))?")


def read_target(target: str) -> str:
    """Return the target as gRPC expects it, with a port. Raises SettingsError."""
    if _OTHER_NAMES.match(target):
        return target
    plain = _PLAIN.fullmatch(target)
    if plain is None or (plain["port"] is not None and not 0 < int(plain["port"]) < 1 << 16):
        rule = "the target must be HOST or HOST:PORT of the service's gRPC port"
        raise SettingsError(f"{rule}, not {target!r}")
    return target if plain["port"] else f"{target}:{DEFAULT_PORT}"
