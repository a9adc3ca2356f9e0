"""Describes the engine API."""

from typing import TYPE_CHECKING

from tgis.router.api.interface import Interface
from tgis.router.api.vllm_engine.rules import VLLM_ENGINE

if TYPE_CHECKING:
    import grpc

    from tgis.router.api.http.service_parts import ServiceParts


def _add_servicer(server: "grpc.aio.Server", parts: "ServiceParts") -> None:
    from smg_grpc_proto.generated.vllm_engine_pb2_grpc import add_VllmEngineServicer_to_server

    from tgis.router.api.vllm_engine.servicer import VllmEngineServicer

    add_VllmEngineServicer_to_server(VllmEngineServicer(parts), server)  # type: ignore[no-untyped-call]


INTERFACE = Interface(rules=VLLM_ENGINE, add_servicer=_add_servicer)
