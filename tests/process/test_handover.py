"""Options and a descriptor that a process receives after it has started."""

import os
import socket
import threading

import pytest

from tgis.process.handover import HandoverError, receive_options, send_options


def test_options_and_a_descriptor_arrive() -> None:
    """The options are larger than the socket's buffer."""
    ours, theirs = socket.socketpair()
    reader, writer = os.pipe()
    options = {"text": "é" * (1 << 20), "number": 7, "nothing": None}
    sender = threading.Thread(target=send_options, args=(ours, options, [writer]))
    sender.start()
    received, [fd] = receive_options(theirs.detach())
    sender.join()
    ours.close()
    assert received == options
    os.close(writer)
    os.write(fd, b"x")
    assert os.read(reader, 1) == b"x"
    os.close(fd)
    os.close(reader)


def test_a_launcher_that_has_ended_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    with pytest.raises(HandoverError, match="the launcher ended before"):
        receive_options(theirs.detach())
