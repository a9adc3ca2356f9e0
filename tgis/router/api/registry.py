"""Lists the APIs. A new API needs a package beside the others and a line here."""

from dataclasses import replace
from typing import TYPE_CHECKING

from tgis.config.aliases.alias import Alias
from tgis.config.network import PortOptions, split_names
from tgis.config.option_names import OptionNames
from tgis.config.processes import COMPAT
from tgis.router.api.fmaas.interface import INTERFACE as FMAAS
from tgis.router.api.interface import AliasMetrics, Interface
from tgis.router.api.lmi.interface import INTERFACE as LMI
from tgis.router.api.openai.interface import INTERFACE as OPENAI
from tgis.router.api.tgi.interface import INTERFACE as TGI
from tgis.router.api.vllm_engine.interface import INTERFACE as VLLM_ENGINE

if TYPE_CHECKING:
    import grpc

    from tgis.router.api.http.http_api import HttpApi
    from tgis.router.api.http.service_parts import ServiceParts

INTERFACES: tuple[Interface, ...] = (FMAAS, VLLM_ENGINE, OPENAI, TGI, LMI)
"""All APIs. Where several HTTP APIs have a path, the last one is the first to claim a request."""


def option_names() -> tuple[OptionNames, ...]:
    """Return the option names of other servers, in the order of COMPAT."""
    servers = [interface.option_names for interface in INTERFACES if interface.option_names is not None]
    return tuple(sorted(servers, key=lambda server: COMPAT.index(server.name)))


def foreign_aliases() -> tuple[Alias, ...]:
    """Return all flags and variables of other servers."""
    return tuple(alias for names in option_names() for alias in names.aliases)


def metric_aliases() -> dict[str, AliasMetrics]:
    """Return the factories of series by the values of `--metrics-alias`."""
    return {name: make for interface in INTERFACES for name, make in interface.metric_aliases.items()}


def http_names() -> tuple[str, ...]:
    """Return the names of all HTTP APIs in the order in which they may claim a request."""
    return tuple(interface.name for interface in reversed(INTERFACES) if interface.build_http_api is not None)


def grpc_names() -> tuple[str, ...]:
    """Return the names of all gRPC APIs."""
    return tuple(interface.name for interface in INTERFACES if interface.add_servicer is not None)


def served_http_names(http_api: str | None) -> tuple[str, ...]:
    """Return the names of the APIs that a value of `--http-api` enables, in the same order."""
    chosen = {*split_names(http_api)}
    always = {interface.name for interface in INTERFACES if interface.accompanies_others} if chosen else set()
    return tuple(name for name in http_names() if name in chosen | always)


def served_interfaces(options: PortOptions) -> list[Interface]:
    """Return the APIs that `--grpc-api` and `--http-api` enable."""
    names = {*split_names(options.grpc_api), *served_http_names(options.http_api)}
    return [interface for interface in INTERFACES if interface.name in names]


def model_placeholders(options: PortOptions) -> tuple[str, ...]:
    """Return the placeholders of all served APIs."""
    return tuple(name for interface in served_interfaces(options) for name in interface.model_placeholders)


def served_rpc_services(options: PortOptions) -> list[str]:
    """Return the names of the gRPC services of all served APIs."""
    return [
        interface.rules.rpc_service for interface in served_interfaces(options) if interface.rules.rpc_service
    ]


def add_servicers(server: "grpc.aio.Server", parts: "ServiceParts") -> None:
    """Add the servicers of all served APIs over gRPC."""
    for interface in served_interfaces(parts.config):
        if interface.add_servicer is not None:
            interface.add_servicer(server, parts)


def build_http_apis(parts: "ServiceParts") -> list["HttpApi"]:
    """Build all HTTP APIs, in the order in which they may claim a request. Collect the operations of the
    served ones. Raises StartupError."""
    [chats] = [
        interface.build_chat_api(parts) for interface in INTERFACES if interface.build_chat_api is not None
    ]
    builders = [interface.build_http_api for interface in INTERFACES if interface.build_http_api is not None]
    served = served_http_names(parts.config.http_api)
    apis = [build(parts, chats) for build in builders]
    apis = [replace(api, is_served=api.rules.name in served) for api in apis]
    parts.operations.extend(operation for api in apis if api.is_served for operation in api.operations)
    return apis[::-1]
