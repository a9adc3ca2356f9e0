"""Sends requests over HTTP 1.1 and reads answers and event streams, over connections that are used again."""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httptools

from tgis.load.apis.interface import LoadTarget
from tgis.load.errors import AnswerError, LoadError
from tgis.load.records import Prompting

CHUNK_BYTES = 1 << 16
MAX_BODY_BYTES = 64 << 20
CLOSE_TIMEOUT_S = 1.0
EVENT = b"data:"
LENGTHS = (b"content-length", b"transfer-encoding")
"""Headers of an answer that says where it ends."""
CONNECTION, PROTOCOL = "connection", "protocol"
"""Kinds of failures without a status."""


@dataclass
class _Reply:
    """State of one answer; httptools calls the methods."""

    body: bytearray = field(default_factory=bytearray)
    is_complete: bool = False
    keeps_alive: bool = False
    has_length: bool = False
    """False if only the end of the connection ends the answer."""
    parser: httptools.HttpResponseParser = field(init=False)

    def __post_init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in LENGTHS:
            self.has_length = True

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.is_complete = True
        self.keeps_alive = self.parser.should_keep_alive()


@dataclass
class _Link:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    num_calls: int = 0


class HttpLinks:
    """Connections to one service."""

    def __init__(self, target: LoadTarget) -> None:
        self._target = target
        self._host, _, port = target.address.rpartition(":")
        self._port = int(port)
        self._idle: list[_Link] = []
        self._context = _read_context(target) if target.is_tls else None

    async def ask(self, method: str, path: str, fields: dict[str, Any] | None = None) -> Any:
        """Return the JSON of an answer. Raises AnswerError."""
        async with self._exchange(method, path, fields) as (parts, reply):
            async for _ in parts:
                pass
        try:
            return json.loads(reply.body)
        except ValueError as error:
            raise AnswerError(PROTOCOL) from error

    async def stream(self, path: str, fields: dict[str, Any], mark: bytes = EVENT) -> AsyncGenerator[bytes]:
        """Yield the data of the events, which are the lines that begin with the mark. Raises AnswerError."""
        async with self._exchange("POST", path, fields) as (parts, reply):
            async for _ in parts:
                lines = reply.body.split(b"\n")
                reply.body = lines.pop()
                for line in lines:
                    if line.startswith(mark) and (data := line[len(mark) :].strip()):
                        yield bytes(data)

    @asynccontextmanager
    async def _exchange(
        self, method: str, path: str, fields: dict[str, Any] | None
    ) -> AsyncIterator[tuple[AsyncIterator[None], _Reply]]:
        """Send a request, and yield an iterator that steps when a part of the answer has arrived."""
        reply = _Reply()
        try:
            link = await self._connect()
            try:
                link.num_calls += 1
                link.writer.write(self._encode(method, path, fields))
                yield _read(link.reader, reply), reply
            except BaseException:
                link.writer.transport.abort()
                raise
        except OSError as error:
            raise AnswerError(CONNECTION, str(error)) from error
        except httptools.HttpParserError as error:
            raise AnswerError(PROTOCOL, str(error)) from error
        limit = self._target.calls_per_connection
        if reply.keeps_alive and (limit is None or link.num_calls < limit):
            self._idle.append(link)
        else:
            link.writer.close()

    async def _connect(self) -> _Link:
        while self._idle:
            link = self._idle.pop()
            if not link.reader.at_eof() and not link.writer.is_closing():
                return link
            link.writer.close()
        return _Link(*await asyncio.open_connection(self._host, self._port, ssl=self._context))

    def _encode(self, method: str, path: str, fields: dict[str, Any] | None) -> bytes:
        body = b"" if fields is None else json.dumps(fields).encode()
        lines = [
            f"{method} {self._target.path}{path} HTTP/1.1",
            f"host: {self._target.address}",
            "content-type: application/json",
            f"content-length: {len(body)}",
        ]
        if self._target.token:
            lines.append(f"authorization: Bearer {self._target.token}")
        return "\r\n".join([*lines, "", ""]).encode() + body

    async def close(self) -> None:
        """Close the idle connections, while the event loop still runs."""
        for link in self._idle:
            link.writer.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                closing = (link.writer.wait_closed() for link in self._idle)
                await asyncio.gather(*closing, return_exceptions=True)
        self._idle.clear()


def _read_context(target: LoadTarget) -> ssl.SSLContext:
    """Return the credentials of connections. Raises LoadError if a file cannot be used."""
    try:
        context = ssl.create_default_context(cafile=target.ca_cert)
        if target.cert is not None:
            context.load_cert_chain(target.cert, target.key)
    except (OSError, ssl.SSLError) as error:
        raise LoadError(f"a TLS file cannot be used: {error}") from error
    return context


@contextmanager
def reading() -> Iterator[None]:
    """Raise AnswerError for JSON of another form."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise AnswerError(PROTOCOL, repr(error)) from error


def stream_error(event: dict[str, Any]) -> AnswerError:
    """Return the error of an event that reports one."""
    return AnswerError("error in the stream", str(event.get("error") or event.get("token")))


def sampling_fields(prompting: Prompting) -> dict[str, Any]:
    """Return the fields that all HTTP APIs name likewise."""
    given: dict[str, float | None] = {"repetition_penalty": prompting.repetition_penalty}
    if prompting.temperature is not None:
        given |= {"temperature": prompting.temperature, "seed": prompting.seed}
        given |= {"top_k": prompting.top_k, "top_p": prompting.top_p}
    return {name: value for name, value in given.items() if value is not None}


def inputs_parameters(prompting: Prompting) -> dict[str, Any]:
    """Return the parameters that TGI's and LMI's APIs name likewise."""
    parameters: dict[str, Any] = {
        "max_new_tokens": prompting.new_tokens,
        "details": True,
        "do_sample": prompting.temperature is not None,
        **sampling_fields(prompting),
    }
    if prompting.max_input_tokens is not None:
        parameters["truncate"] = prompting.max_input_tokens
    return parameters


async def _read(reader: asyncio.StreamReader, reply: _Reply) -> AsyncIterator[None]:
    while not reply.is_complete:
        data = await reader.read(CHUNK_BYTES)
        if not data:
            _check_end(reply)
            return
        reply.parser.feed_data(data)
        if len(reply.body) > MAX_BODY_BYTES:
            raise AnswerError(PROTOCOL)
        if reply.parser.get_status_code() < 400:
            yield
        elif reply.is_complete:
            raise _status_error(reply)


def _check_end(reply: _Reply) -> None:
    """Raise AnswerError if the connection has ended before the answer."""
    status = reply.parser.get_status_code()
    if status >= 400:
        raise _status_error(reply)
    if reply.has_length or not status:
        raise AnswerError(CONNECTION, "the connection ended before the answer")


def _status_error(reply: _Reply) -> AnswerError:
    return AnswerError(f"HTTP {reply.parser.get_status_code()}", reply.body.decode(errors="replace"))
