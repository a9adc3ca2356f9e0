"""Attacks of hostile clients on the gRPC port, with a certificate and without, and on OpenAI's API."""

import contextlib
import socket
import time
from collections.abc import Callable
from random import Random

import grpc

from integration_tests.chaos.http_streams import HTTP_STREAMS
from integration_tests.chaos.target import Target
from tests.support.router import attacks
from tests.support.router.http2 import INITIAL_WINDOW_SIZE, Connection
from tgis.pb import generation_pb2 as pb

HOST = "127.0.0.1"
NUM_FRAMES = 3000
NUM_HALF_OPEN, HALF_OPEN_S = 200, 3.0
UNREAD_S = 8.0  # longer than the service waits for a reader
Fault = Callable[[Target, Random], None]


def flood(target: Target, random: Random) -> None:
    """Flood of one type of frames, from a client with a certificate."""
    name = random.choice([name for name in attacks.FLOODS if name not in ("odd_frames", "garbage")])
    attacks.FLOODS[name](HOST, target.proxy.port, NUM_FRAMES, random.getrandbits(32))


def break_rules(target: Target, random: Random) -> None:
    """Invalid frames, and bytes that are not frames, with a certificate and without."""
    seed = random.getrandbits(32)
    attacks.odd_frames(HOST, target.proxy.port, 19, seed)
    attacks.garbage(HOST, target.proxy.port, 8, seed)
    attacks.garbage(*target.address, 8, seed)


def mutate(target: Target, random: Random) -> None:
    """Damaged messages, which get a response or a status, never the text of an exception."""
    for outcome in attacks.mutated_messages(HOST, target.proxy.port, 60, random.getrandbits(32)):
        assert outcome.code is not grpc.StatusCode.UNKNOWN, outcome


def half_open(target: Target, random: Random) -> None:
    """Silent connections."""
    with attacks.half_open(*target.address, NUM_HALF_OPEN, random.getrandbits(32)):
        time.sleep(HALF_OPEN_S)


def read_nothing(target: Target, random: Random) -> None:
    """Streams whose client does not open the flow-control window."""
    params = pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=150, min_new_tokens=150))
    request = pb.SingleGenerationRequest(request=pb.GenerationRequest(text="girl"), params=params)
    with Connection(HOST, target.proxy.port, [(INITIAL_WINDOW_SIZE, 0)]) as connection:
        for stream in (1, 3, 5):
            connection.call(stream, attacks.SERVICE + "GenerateStream", request.SerializeToString())
        time.sleep(UNREAD_S)


def read_no_events(target: Target, random: Random) -> None:
    """HTTP streams whose client does not read, with a small receive buffer."""
    with contextlib.ExitStack() as stack:
        for path, body in HTTP_STREAMS * 2:
            connection = stack.enter_context(contextlib.closing(target.connect_http()))
            with contextlib.suppress(OSError):
                connection.connect()
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
                connection.request("POST", path, body)
        time.sleep(UNREAD_S)


ATTACKS: tuple[Fault, ...] = (flood, break_rules, mutate, half_open, read_nothing, read_no_events)
