"""Lists the servers whose option names the launcher accepts with `--compat`."""

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
    """The server's flags and variables; empty for LMI, whose names are keys of a file."""
    model_flag: str
    """The required flag, or key of the file, that names the model."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """The server's defaults for options of this service that are not given."""


SERVERS = (
    OtherServer("tgi", "TGI", tgi.TGI_NAMES, "--model-id", tgi.DEFAULTS),
    OtherServer("vllm", "vLLM", vllm.VLLM_NAMES, "--model", vllm.DEFAULTS),
    OtherServer("lmi", "LMI", (), lmi.MODEL_ID),
)
ALIASES = tuple(one for server in SERVERS for one in server.aliases)
COMPAT = tuple(server.name for server in SERVERS)
