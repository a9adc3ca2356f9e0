"""Serves the gRPC port: interceptors, health, load reports, reflection, and the servicers of the APIs."""

from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tgis.config.processes import RouterConfig
from tgis.net.ports import PortError
from tgis.net.tls import Certificates
from tgis.pb.orca_pb2_grpc import add_OpenRcaServiceServicer_to_server
from tgis.router.api.grpc.health import NAME as HEALTH
from tgis.router.api.grpc.health import Health
from tgis.router.api.grpc.interceptors.auth_interceptor import AuthInterceptor
from tgis.router.api.grpc.interceptors.error_interceptor import ErrorInterceptor
from tgis.router.api.grpc.interceptors.gateway_interceptor import GatewayInterceptor
from tgis.router.api.grpc.interceptors.load_interceptor import LoadInterceptor
from tgis.router.api.grpc.load_service import NAME as LOAD_REPORTS
from tgis.router.api.grpc.load_service import LoadService
from tgis.router.api.grpc.refusal_pacing import RefusalPacing
from tgis.router.api.grpc.server_options import grpc_options
from tgis.router.api.grpc.slow_clients import SlowClients
from tgis.router.api.grpc.unsent_answers import shorten_send_errors
from tgis.router.api.port_resources import PortResources


class GrpcPort:
    def __init__(
        self, config: RouterConfig, resources: PortResources, health: Health, api_services: Sequence[str]
    ) -> None:
        """Build the server. `api_services` are the names of the APIs' gRPC services. The caller adds their
        servicers to `server`."""
        self._bind = config.bind
        self._certificates = resources.certificates
        self._slow_clients = SlowClients(config.slow_reader_timeout)
        self._pacing = RefusalPacing()
        self._load_service = LoadService(resources.load_reports)
        shorten_send_errors()
        interceptors = self._build_interceptors(config, resources)
        self.server = grpc.aio.server(interceptors=interceptors, options=grpc_options(config))
        health_pb2_grpc.add_HealthServicer_to_server(health, self.server)
        add_OpenRcaServiceServicer_to_server(self._load_service, self.server)
        names = (*api_services, HEALTH, LOAD_REPORTS, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.server)

    async def start(self, number: int) -> None:
        """Listen on port `number`. Raises PortError if another process listens on it now."""
        try:
            _add_port(self.server, self._bind, number, self._certificates)
        except RuntimeError as error:
            raise PortError(f"port {number} on {self._bind} cannot be opened; is it in use?") from error
        await self.server.start()

    async def watch(self) -> None:
        """End calls whose clients do not read, until cancelled."""
        await self._slow_clients.watch()

    def begin_drain(self) -> None:
        """End what would delay the end of the server: streams of load reports, and paced refusals."""
        self._pacing.end()
        self._load_service.end()

    async def stop(self, timeout_s: float) -> None:
        """Refuse new calls, and abort the remaining ones after the time limit."""
        await self.server.stop(timeout_s)

    async def cut(self) -> None:
        """Abort all calls."""
        await self.server.stop(0)

    def _build_interceptors(
        self, config: RouterConfig, resources: PortResources
    ) -> list[grpc.aio.ServerInterceptor]:
        """Return the interceptors. Each call passes them in this order."""
        failures = resources.metrics.request_failure
        interceptors: list[grpc.aio.ServerInterceptor] = []
        if resources.tokens is not None:
            interceptors.append(AuthInterceptor(resources.tokens, failures))
        if config.trust_metadata:
            interceptors.append(GatewayInterceptor(config.trust_metadata))
        interceptors.append(LoadInterceptor(resources.load_reports))
        interceptors.append(ErrorInterceptor(self._slow_clients, self._pacing, resources.memory, failures))
        return interceptors


def _add_port(server: grpc.aio.Server, bind: str, number: int, certificates: Certificates | None) -> None:
    address = f"[{bind}]:{number}" if ":" in bind else f"{bind}:{number}"
    if certificates is None:
        server.add_insecure_port(address)
    else:
        server.add_secure_port(address, certificates.credentials())
