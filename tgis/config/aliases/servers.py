"""Other servers whose option names the launcher reads if `--compat` names the server."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tgis.config.aliases import lmi, tgi, vllm
from tgis.config.aliases.alias import Alias


@dataclass(frozen=True)
class OtherServer:
    name: str
    """Value of `--compat`."""
    title: str
    aliases: tuple[Alias, ...]
    """Its flags and variables; LMI's names are keys of a file instead."""
    model_flag: str
    """Flag, or key of a file, of the model, which must be given."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """The server's values of options of this service that are not given."""


SERVERS = (
    OtherServer("tgi", "TGI", tgi.TGI_NAMES, "--model-id", tgi.DEFAULTS),
    OtherServer("vllm", "vLLM", vllm.VLLM_NAMES, "--model", vllm.DEFAULTS),
    OtherServer("lmi", "LMI", (), lmi.MODEL_ID),
)
ALIASES = tuple(one for server in SERVERS for one in server.aliases)
COMPAT = tuple(server.name for server in SERVERS)
