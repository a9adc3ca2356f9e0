"""Describes an API to the rest of the router.
The command line and the engine process read these descriptions too. An interface module therefore imports
handlers only inside the functions that build them."""

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
    from tgis.router.metrics.aliased_series import MakeAliases

AddServicer = Callable[["grpc.aio.Server", "ServiceParts"], None]
"""Adds a servicer to a server."""
BuildHttpApi = Callable[["ServiceParts", "ChatApi"], "HttpApi"]
"""Returns the routes and error form of an API over HTTP. Raises StartupError."""
AliasMetrics = Callable[[str, int], "MakeAliases"]
"""Returns a factory of the series, given the model's name and the maximum length of a sequence."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Interface:
    """API for clients over gRPC, HTTP or both."""

    rules: ApiRules
    add_servicer: AddServicer | None = None
    build_http_api: BuildHttpApi | None = None
    build_chat_api: Callable[["ServiceParts"], "ChatApi"] | None = None
    """Returns the handlers of chats and completions, which other APIs call too. Raises StartupError."""
    names_models: bool = True
    """False if the API's requests and answers contain no names of models."""
    accompanies_others: bool = False
    """True to serve the API whenever another HTTP API is served."""
    option_names: OptionNames | None = None
    """Names of the options that the launcher reads with `--compat`."""
    metric_aliases: Mapping[str, AliasMetrics] = field(default_factory=dict)
    """Values of `--metrics-alias`, each for series with the names that another server of this API uses."""
    model_placeholders: tuple[str, ...] = ()
    """Names that clients of this API send as `model` if their user sets none. While the API is served, they
    mean the served model in every API."""

    @property
    def name(self) -> str:
        return self.rules.name
