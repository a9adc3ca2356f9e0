"""Ports that several processes share, and that no other process can open, on sockets of this machine."""

import socket
from collections.abc import Callable
from contextlib import ExitStack, closing

import pytest

from tgis.net.ports import IN_USE, PortError, listen, reserve, reserve_for_sharing

HOST = "127.0.0.1"
Open = Callable[[str, int], socket.socket]


def port_of(opened: socket.socket) -> int:
    port: int = opened.getsockname()[1]
    return port


def check_refused(opening: Open, port: int) -> None:
    with pytest.raises(PortError) as caught:
        opening(HOST, port)
    assert str(caught.value) == f"port {port} on {HOST} cannot be opened: Address already in use{IN_USE}"


@pytest.fixture
def kept() -> socket.socket:
    return reserve_for_sharing(HOST, 0)


@pytest.mark.parametrize("opening", [listen, reserve, reserve_for_sharing])
@pytest.mark.parametrize("num_listeners", [0, 1, 2])
def test_a_reserved_port_cannot_be_opened_by_others(
    kept: socket.socket, opening: Open, num_listeners: int
) -> None:
    with ExitStack() as stack:
        port = port_of(stack.enter_context(closing(kept)))
        for _ in range(num_listeners):
            stack.enter_context(listen(HOST, port, is_shared=True))
        check_refused(opening, port)
    opening(HOST, port).close()


def test_a_port_that_is_kept_refuses_connections_until_somebody_listens(kept: socket.socket) -> None:
    with closing(kept), reserve(HOST, port_of(kept), is_shared=True):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port_of(kept)))
        with listen(HOST, port_of(kept), is_shared=True):
            socket.create_connection((HOST, port_of(kept))).close()


def test_a_port_that_somebody_has_is_not_kept() -> None:
    with listen(HOST, 0) as alone:
        check_refused(reserve_for_sharing, port_of(alone))


def test_connections_spread_over_those_that_listen(kept: socket.socket) -> None:
    """Connections go to the remaining sockets when one is closed."""
    with closing(kept), ExitStack() as stack:
        port = port_of(kept)
        first, second = (stack.enter_context(listen(HOST, port, is_shared=True)) for _ in range(2))
        assert all(connect_and_accept(port, 64, first, second))
        first.close()
        assert connect_and_accept(port, 16, second) == [16]


def connect_and_accept(port: int, count: int, *listeners: socket.socket) -> list[int]:
    """Open this many connections, and return how many each listener accepted. This end closes each of them
    first, so the port waits for their last packets."""
    with ExitStack() as clients:
        for _ in range(count):
            clients.enter_context(socket.create_connection((HOST, port)))
        return [accept_all(listener) for listener in listeners]


def accept_all(listener: socket.socket) -> int:
    listener.setblocking(False)
    count = 0
    while True:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return count
        connection.close()
        count += 1


def test_a_port_whose_last_connections_have_just_ended_is_kept(kept: socket.socket) -> None:
    with closing(kept), listen(HOST, port_of(kept), is_shared=True) as listener:
        port = port_of(kept)
        connect_and_accept(port, 4, listener)
    reserve_for_sharing(HOST, port).close()
