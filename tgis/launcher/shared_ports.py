"""Keeps the public ports of a service for its router workers, which share them."""

import socket
from dataclasses import replace
from typing import Generic, TypeVar

from tgis.config.processes import LauncherConfig, RouterConfig
from tgis.net.ports import keep_for_sharing, listen

PORTS = ("port", "grpc_port", "http_api_port")

C = TypeVar("C", LauncherConfig, RouterConfig)


def check_ports(config: LauncherConfig) -> None:
    """Check that the ports are free that a router or a headless node opens later. Raises PortError."""
    for port in (config.port,) if config.headless else (config.port, config.grpc_port):
        listen(config.bind, port).close()


class SharedPorts(Generic[C]):
    """Sockets that keep the ports as long as the service runs, so that a second service cannot share them."""

    def __init__(self, config: C) -> None:
        """Keep the configured ports. Raises PortError if one is taken."""
        asked = {name: getattr(config, name) for name in PORTS}
        given = {name: port for name, port in asked.items() if port is not None}
        self._sockets: dict[str, socket.socket] = {}
        try:
            for name, port in given.items():
                self._sockets[name] = keep_for_sharing(config.bind, port)
        except BaseException:
            self.close()
            raise
        numbers = {name: kept.getsockname()[1] for name, kept in self._sockets.items()}
        self.config: C = replace(config, **numbers)
        """The configuration with the numbers of the ports, which is of use where free ones were asked for."""

    def close(self) -> None:
        for kept in self._sockets.values():
            kept.close()
