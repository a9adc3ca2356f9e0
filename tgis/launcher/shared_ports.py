"""Reserves the public ports of a service for its router workers, which share them."""

import socket
from dataclasses import replace
from typing import Generic, TypeVar

from tgis.config.processes import LauncherConfig, RouterConfig
from tgis.net.ports import listen, reserve_for_sharing

PORTS = ("port", "grpc_port", "http_api_port")

C = TypeVar("C", LauncherConfig, RouterConfig)


def check_ports(config: LauncherConfig) -> None:
    """Check that the ports that the router or a headless node will open are free. Raises PortError."""
    for name in ("port",) if config.headless else PORTS:
        if (port := getattr(config, name)) is not None:
            listen(config.bind, port).close()


class SharedPorts(Generic[C]):
    """Sockets that reserve the ports while the service runs, so that a second service cannot share them."""

    def __init__(self, config: C) -> None:
        """Reserve the configured ports. Raises PortError if one is taken."""
        ports = {name: getattr(config, name) for name in PORTS}
        self._sockets: dict[str, socket.socket] = {}
        try:
            for name, port in ports.items():
                if port is not None:
                    self._sockets[name] = reserve_for_sharing(config.bind, port)
        except BaseException:
            self.close()
            raise
        numbers = {name: reserved.getsockname()[1] for name, reserved in self._sockets.items()}
        self.config: C = replace(config, **numbers)
        """Configuration with the numbers of the reserved ports instead of 0."""

    def close(self) -> None:
        for reserved in self._sockets.values():
            reserved.close()
