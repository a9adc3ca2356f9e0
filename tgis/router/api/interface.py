"""Describes an API to the rest of the router.

The command line and the engine process read descriptions too, so that these import no handlers: only the
functions do that build what serves an API."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tgis.config.option_names import OptionNames
from tgis.router.requests.api_rules import ApiRules

if TYPE_CHECKING:
    import grpc

    from tgis.router.api.http.chat_api import ChatApi
    from tgis.router.api.http.http_api import HttpApi
    from tgis.router.api.http.service_parts import ServiceParts
    from tgis.router.api.service import GenerationService
    from tgis.router.metrics.aliased_series import MakeAliases
    from tgis.router.text.tokenizer import Tokenizer

AddServicer = Callable[["grpc.aio.Server", "GenerationService", "Tokenizer"], None]
"""Adds a servicer to a server."""
BuildHttpApi = Callable[["ServiceParts", "ChatApi"], "HttpApi"]
"""Returns the routes and error form of an API over HTTP. Raises StartupError."""
AliasMetrics = Callable[[str, int], "MakeAliases"]
"""Returns what makes the series, for the model's name and the maximum length of a sequence."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Interface:
    """API that clients speak, over gRPC, HTTP or both."""

    rules: ApiRules
    add_servicer: AddServicer | None = None
    build_http_api: BuildHttpApi | None = None
    build_chat_api: Callable[["ServiceParts"], "ChatApi"] | None = None
    """Returns the handlers of chats and completions that other APIs call. Raises StartupError."""
    accompanies_others: bool = False
    """True if the API is served whenever another API over HTTP is."""
    option_names: OptionNames | None = None
    """Names of options that the launcher reads with `--compat`."""
    metric_aliases: Mapping[str, AliasMetrics] = field(default_factory=dict)
    """Values of `--metrics-alias` for series under the names of servers of this API."""
    model_placeholders: tuple[str, ...] = ()
    """Names that clients of this API send as `model` if their user names none. While the API is served, they
    mean the served model in every API."""

    @property
    def name(self) -> str:
        return self.rules.name
