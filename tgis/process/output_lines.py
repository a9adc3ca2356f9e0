"""Reads the output of child processes line by line, and gives the lines their final form."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from tgis.logs import Scalar
from tgis.process.json_lines import to_json

READ_BYTES = 1 << 16
# Longer lines are split. The limit for JSON records is higher, because a split record is invalid JSON.
MAX_LINE_BYTES = READ_BYTES
MAX_JSON_BYTES = 1 << 20


@dataclass(frozen=True)
class LineForm:
    """Form of a child's output lines."""

    prefix: str = ""
    """Text before each line. JSON objects have none."""
    fields: Mapping[str, Scalar] | None = None
    """Fields of the JSON object that each line becomes, or None for lines of text."""

    @property
    def max_bytes(self) -> int:
        return MAX_LINE_BYTES if self.fields is None else MAX_JSON_BYTES

    def apply(self, line: str) -> str:
        return self.prefix + line if self.fields is None else to_json(line, self.fields)


PLAIN = LineForm()


async def read_lines(stream: asyncio.StreamReader, max_bytes: int) -> AsyncIterator[str]:
    """Yield the lines as text. Lines that are too long are split, to bound the memory."""
    pending = b""
    while chunk := await stream.read(READ_BYTES):
        *lines, pending = (pending + chunk).split(b"\n")
        if len(pending) >= max_bytes:
            lines.append(pending)
            pending = b""
        for line in lines:
            yield line.decode(errors="replace")
    if pending:
        yield pending.decode(errors="replace")
