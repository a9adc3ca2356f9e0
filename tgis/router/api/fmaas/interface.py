"""Describes TGIS's API."""

from typing import TYPE_CHECKING

from tgis.router.api.fmaas.rules import FMAAS
from tgis.router.api.interface import Interface

if TYPE_CHECKING:
    import grpc

    from tgis.router.api.http.service_parts import ServiceParts


def _add_servicer(server: "grpc.aio.Server", parts: "ServiceParts") -> None:
    from tgis.pb.generation_pb2_grpc import add_GenerationServiceServicer_to_server
    from tgis.router.api.fmaas.servicer import GenerationServicer

    add_GenerationServiceServicer_to_server(GenerationServicer(parts.service, parts.tokenizer), server)


INTERFACE = Interface(rules=FMAAS, add_servicer=_add_servicer, names_models=False)
