"""Other servers whose option names the launcher reads if `--compat` names the server."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tgis.config.aliases import vllm
from tgis.config.aliases.alias import Alias
from tgis.config.aliases.tgi import TGI_NAMES


@dataclass(frozen=True)
class OtherServer:
    name: str
    """Value of `--compat`."""
    title: str
    aliases: tuple[Alias, ...]
    """Its flags and variables; LMI's names are keys of a file instead."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """The server's values of options of this service that are not given."""


SERVERS = (
    OtherServer("tgi", "TGI", TGI_NAMES),
    OtherServer("vllm", "vLLM", vllm.VLLM_NAMES, vllm.DEFAULTS),
    OtherServer("lmi", "LMI", ()),
)
ALIASES = tuple(one for server in SERVERS for one in server.aliases)
COMPAT = tuple(server.name for server in SERVERS)
