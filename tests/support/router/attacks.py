"""Attacks of a hostile client on the gRPC port, as functions of host, port, count and seed, and a bystander
that calls continuously and must not be affected."""

import contextlib
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.router.http2 import (
    ACK,
    END_HEADERS,
    END_STREAM,
    PREFACE,
    Connection,
    Frame,
    Kind,
    call_headers,
    frame,
    header_block,
    message,
    settings,
)
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

SERVICE = "/fmaas.GenerationService/"
HEALTH = "/grpc.health.v1.Health/"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/"
CANCEL = struct.pack("!I", 8)
LISTEN_S = 0.3  # time to receive the reaction to an attack
PAUSE_S = 0.01  # pause between a bystander's calls
LEAST_CALLS = 5  # of each kind, even if an attack is over immediately
CALL_TIMEOUT_S = 60.0


class Bystander:
    """Client with its own connection that repeats Generate, GenerateStream and Health calls in its
    context."""

    def __init__(self, host: str, port: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.insecure_channel(f"{host}:{port}", options)
        self._stub = GenerationServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._has_ended = threading.Event()
        self.lost: list[str] = []
        self.slowest_s = 0.0
        calls = (self._generate, self._stream, self._check)
        self._threads = [threading.Thread(target=self._repeat, args=(call,)) for call in calls]

    def __enter__(self) -> "Bystander":
        for call in (self._generate, self._stream, self._check):
            call()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._has_ended.set()
        for thread in self._threads:
            thread.join()
        self._channel.close()

    def _repeat(self, call: Callable[[], None]) -> None:
        num_calls = 0
        while not self._has_ended.wait(PAUSE_S) or num_calls < LEAST_CALLS:
            begun = time.monotonic()
            try:
                call()
            except grpc.RpcError as error:
                self.lost.append(f"{call.__name__}: {error.code()} {error.details()}")
            except AssertionError as error:
                self.lost.append(f"{call.__name__}: {error}")
            self.slowest_s = max(self.slowest_s, time.monotonic() - begun)
            num_calls += 1

    def _generate(self) -> None:
        request = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="a girl")])
        request.params.stopping.max_new_tokens = 3
        assert len(self._stub.Generate(request, timeout=CALL_TIMEOUT_S).responses) == 1

    def _stream(self) -> None:
        request = pb.SingleGenerationRequest(request=pb.GenerationRequest(text="a girl"))
        request.params.stopping.max_new_tokens = 3
        *_, last = self._stub.GenerateStream(request, timeout=CALL_TIMEOUT_S)
        assert last.stop_reason, "a stream that ends has a reason"

    def _check(self) -> None:
        response = self._health.Check(health_pb2.HealthCheckRequest(), timeout=CALL_TIMEOUT_S)
        assert response.status == health_pb2.HealthCheckResponse.SERVING, "not serving"


class Outcome(NamedTuple):
    """Result of a call."""

    method: str
    code: grpc.StatusCode
    details: str


def _whole_messages() -> dict[str, Message]:
    params = pb.Parameters(
        method=pb.SAMPLE,
        sampling=pb.SamplingParameters(temperature=0.7, top_k=5, top_p=0.5, typical_p=0.5, seed=7),
        stopping=pb.StoppingCriteria(max_new_tokens=5, stop_sequences=["e"], time_limit_millis=5000),
        response=pb.ResponseOptions(
            generated_tokens=True, input_tokens=True, top_n_tokens=2, input_text=True
        ),
        decoding=pb.DecodingParameters(repetition_penalty=1.2, regex="[a-z]{1,4}"),
        truncate_input_tokens=7,
    )
    texts = [pb.GenerationRequest(text="a girl"), pb.GenerationRequest(text="naïve café 🙂")]
    return {
        SERVICE + "Generate": pb.BatchedGenerationRequest(requests=texts, params=params),
        SERVICE + "GenerateStream": pb.SingleGenerationRequest(request=texts[1], params=params),
        SERVICE + "Tokenize": pb.BatchedTokenizeRequest(
            requests=[pb.TokenizeRequest(text="a girl")], return_tokens=True, return_offsets=True
        ),
        SERVICE + "ModelInfo": pb.ModelInfoRequest(model_id="any"),
        HEALTH + "Check": health_pb2.HealthCheckRequest(service="fmaas.GenerationService"),
        REFLECTION + "ServerReflectionInfo": health_pb2.HealthCheckRequest(service="localhost"),
    }


def mutated(data: bytes, dice: random.Random) -> bytes:
    """Return the data, damaged in one to three ways."""
    for _ in range(dice.choice((1, 1, 2, 3))):
        at = dice.randrange(len(data) + 1)
        data = dice.choice(_MUTATIONS)(data, at, dice)
    return data


def _flip(data: bytes, at: int, dice: random.Random) -> bytes:
    flipped = bytearray(data + b"\0")
    flipped[at] ^= 1 << dice.randrange(8)
    return bytes(flipped[: len(data)])


def _cut(data: bytes, at: int, dice: random.Random) -> bytes:
    return data[:at]


def _repeat_part(data: bytes, at: int, dice: random.Random) -> bytes:
    return data[:at] + data[max(0, at - dice.randint(1, 40)) :]


def _insert(data: bytes, at: int, dice: random.Random) -> bytes:
    return data[:at] + dice.randbytes(dice.randint(1, 9)) + data[at:]


def _overlong_varint(data: bytes, at: int, dice: random.Random) -> bytes:
    return data[:at] + b"\xff" * dice.randint(1, 11) + b"\x01" + data[at + 1 :]


def _other_wire_type(data: bytes, at: int, dice: random.Random) -> bytes:
    tag = data[at] & ~7 | dice.randrange(8) if at < len(data) else 0x0F
    return data[:at] + bytes([tag]) + data[at + 1 :]


def _huge_length(data: bytes, at: int, dice: random.Random) -> bytes:
    return data[:at] + b"\xff\xff\xff\xff" + bytes([dice.randrange(128)]) + data[at + 1 :]


_MUTATIONS = [_flip, _cut, _repeat_part, _insert, _overlong_varint, _other_wire_type, _huge_length]


def mutated_messages(host: str, port: int, count: int, seed: int) -> list[Outcome]:
    """Make `count` calls over all methods in turn."""
    dice, wholes = random.Random(seed), [(m, w.SerializeToString()) for m, w in _whole_messages().items()]
    calls = [(method, mutated(data, dice)) for method, data in (wholes * count)[:count]]
    with grpc.insecure_channel(f"{host}:{port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        with ThreadPoolExecutor(8) as threads:
            return list(threads.map(lambda call: _outcome(channel, *call), calls))


def _outcome(channel: grpc.Channel, method: str, data: bytes) -> Outcome:
    try:
        if method.startswith(REFLECTION):
            list(channel.stream_stream(method)(iter([data]), timeout=CALL_TIMEOUT_S))
        elif method.endswith("Stream"):
            list(channel.unary_stream(method)(data, timeout=CALL_TIMEOUT_S))
        else:
            channel.unary_unary(method)(data, timeout=CALL_TIMEOUT_S)
    except grpc.RpcError as error:
        return Outcome(method, error.code(), error.details() or "")
    return Outcome(method, grpc.StatusCode.OK, "")


@contextmanager
def _attacker(host: str, port: int) -> Iterator[Connection]:
    with Connection(host, port) as connection:
        connection.send(frame(Kind.SETTINGS, flags=ACK))
        yield connection


def _send_all(connection: Connection, parts: Iterator[bytes]) -> list[Frame]:
    """Send all parts until the other end closes the connection. Return the frames that it sent."""
    for part in parts:
        if not connection.send(part):
            break
    return list(connection.frames(LISTEN_S))


_REQUEST = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="a girl")]).SerializeToString()


def rapid_reset(host: str, port: int, count: int, seed: int) -> list[Frame]:
    """Send calls that are cancelled before they can be answered."""
    block = header_block(call_headers(SERVICE + "Generate"))
    data = frame(Kind.DATA, message(_REQUEST), END_STREAM)

    def parts() -> Iterator[bytes]:
        for stream in range(1, 2 * count, 2):
            begun = frame(Kind.HEADERS, block, END_HEADERS, stream)
            if stream % 4 == 1:
                begun += data[:5] + struct.pack("!I", stream) + data[9:]
            yield begun + frame(Kind.RST_STREAM, CANCEL, stream=stream)

    with _attacker(host, port) as connection:
        return _send_all(connection, parts())


def endless_headers(host: str, port: int, count: int, seed: int) -> list[Frame]:
    """Send a header block of `count` frames of a kilobyte that does not end."""
    block, more = header_block(call_headers(SERVICE + "Generate")), header_block([("x", "y" * 1000)])

    def parts() -> Iterator[bytes]:
        yield frame(Kind.HEADERS, block, stream=1)
        for _ in range(count):
            yield frame(Kind.CONTINUATION, more, stream=1)

    with _attacker(host, port) as connection:
        return _send_all(connection, parts())


def settings_flood(host: str, port: int, count: int, seed: int) -> list[Frame]:
    dice = random.Random(seed)
    with _attacker(host, port) as connection:
        return _send_all(connection, (settings([(0x4, dice.randrange(1 << 16))]) for _ in range(count)))


def ping_flood(host: str, port: int, count: int, seed: int) -> list[Frame]:
    with _attacker(host, port) as connection:
        return _send_all(connection, (frame(Kind.PING, struct.pack("!Q", i)) for i in range(count)))


def odd_frames(host: str, port: int, count: int, seed: int) -> list[Frame]:
    """Send one invalid frame on each of `count` connections with an active call."""
    dice, received = random.Random(seed), []
    for i in range(count):
        wrong = _ODD_FRAMES[i % len(_ODD_FRAMES)]
        with _attacker(host, port) as connection:
            connection.call(1, SERVICE + "Generate", _REQUEST)
            connection.send(wrong or frame(dice.randrange(256), dice.randbytes(20), dice.randrange(256), 1))
            received += list(connection.frames(LISTEN_S / 10))
    return received


_INCREMENT = struct.pack("!I", 0x7FFFFFFF)
_ODD_FRAMES = [
    frame(Kind.WINDOW_UPDATE, _INCREMENT) * 3,  # exceeds the maximum window
    frame(Kind.WINDOW_UPDATE, _INCREMENT, stream=1) * 3,
    frame(Kind.WINDOW_UPDATE, bytes(4)),
    frame(Kind.DATA, message(_REQUEST), END_STREAM, 1) * 3,  # after the end of the stream
    frame(Kind.DATA, b"x", 0, 9),  # unknown stream
    frame(Kind.DATA, b"x"),
    frame(Kind.HEADERS, b"\xff" * 50, END_HEADERS, 3),  # invalid header block
    frame(Kind.HEADERS, header_block(call_headers(SERVICE + "Generate")), END_HEADERS, 2),
    frame(Kind.CONTINUATION, b"", END_HEADERS, 3),  # without headers before it
    frame(Kind.PUSH_PROMISE, struct.pack("!I", 2), END_HEADERS, 1),
    frame(Kind.PRIORITY, struct.pack("!IB", 1, 255), 0, 1) * 100,
    frame(Kind.SETTINGS, b"abc"),
    frame(Kind.PING, b"abc"),
    frame(Kind.RST_STREAM, CANCEL, stream=7),
    frame(Kind.GOAWAY, bytes(8)),
    frame(0x77, b"x" * 100, 0xFF, 1),  # unknown frame type
    b"\xff\xff\xff" + frame(Kind.DATA, b"", 0, 1)[3:],  # length of 16 MiB
    frame(Kind.DATA, b"\xff" * 16384, 8, 1),  # more padding than data
    b"",  # random frame
]


def garbage(host: str, port: int, count: int, seed: int) -> None:
    """Send data that is not HTTP/2, or only begins like it, on each of `count` connections."""
    dice = random.Random(seed)
    for i in range(count):
        data = _GARBAGE[i % len(_GARBAGE)] or dice.randbytes(dice.randint(1, 4000))
        with contextlib.suppress(OSError), socket.create_connection((host, port), CALL_TIMEOUT_S) as end:
            end.sendall(data)
            end.settimeout(LISTEN_S / 10)
            end.recv(1 << 16)


def _client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    end = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        end.do_handshake()
    return outgoing.read()


_GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /fmaas.GenerationService/Generate HTTP/1.1\r\nUpgrade: h2c\r\nContent-Length: 9999999\r\n\r\n",
    _client_hello(),
    PREFACE[:10],
    PREFACE,
    PREFACE + b"\xff" * 1000,
    PREFACE + settings([]) + b"\0" * 9 * 1000,
    b"",  # random data
]


@contextmanager
def half_open(host: str, port: int, count: int, seed: int) -> Iterator[list[socket.socket]]:
    """Open `count` connections that send nothing, or half of the first message, within the context."""
    ends: list[socket.socket] = []
    try:
        for i in range(count):
            ends.append(socket.create_connection((host, port), CALL_TIMEOUT_S))
            if i % 2:
                with contextlib.suppress(OSError):
                    ends[-1].sendall(PREFACE[:12])
        yield ends
    finally:
        for end in ends:
            end.close()


FLOODS: dict[str, Callable[[str, int, int, int], object]] = {
    each.__name__: each
    for each in (rapid_reset, endless_headers, settings_flood, ping_flood, odd_frames, garbage)
}
