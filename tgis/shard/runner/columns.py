"""Declares each column of the row table once: its type, its source in the message that opens a row, and the
memory from which steps read it."""

from collections.abc import Callable
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tgis.pb import shard_pb2 as pb
from tgis.sampling_parameters import PARAMETERS
from tgis.shard.sampling.sampler import is_plain, read_parameter

NOT_WANTED = np.iinfo(np.int64).max


class Place(Enum):
    """Memory from which a step reads a column. On a CPU, all columns are in host memory."""

    HOST = "host"
    DEVICE = "device"
    BOTH = "both"


class Column(NamedTuple):
    """Column with one value per row."""

    name: str
    dtype: str
    place: Place
    read: Callable[[pb.OpenRow], Any]
    """Function that returns the initial value for a new row."""


class RaggedColumn(NamedTuple):
    """Column with a list of values per row."""

    name: str
    dtype: str
    place: Place
    read: Callable[[pb.OpenRow], bytes]
    """Function that returns the field with the list, little-endian."""
    pad: float
    """Value of unused entries."""


def read_column(column: bytes) -> npt.NDArray[np.int32]:
    return np.frombuffer(column, "<i4")


def _num_tokens(message: pb.OpenRow) -> int:
    return len(read_column(message.token_ids))


def _limit(message: pb.OpenRow) -> int:
    return message.prompt_len + message.max_new_tokens


def _input_from(message: pb.OpenRow) -> int:
    return message.details.input_from if message.details.input_tokens else NOT_WANTED


STATE = (
    Column("open", "?", Place.HOST, lambda message: True),
    Column("ended", "?", Place.BOTH, lambda message: _num_tokens(message) >= _limit(message)),
    # number of prompt and generated tokens, and so the position of the next token
    Column("length", "i8", Place.BOTH, _num_tokens),
    Column("opened_len", "i8", Place.BOTH, _num_tokens),
    Column("prompt_len", "i8", Place.BOTH, attrgetter("prompt_len")),
    Column("limit", "i8", Place.BOTH, _limit),  # length at which the row ends
    Column("num_blocks", "i8", Place.HOST, lambda message: 0),
    Column("encoder_len", "i8", Place.BOTH, lambda message: len(read_column(message.encoder_token_ids))),
    Column("state_slot", "i8", Place.HOST, attrgetter("state_slot")),
    Column("logprobs", "?", Place.HOST, attrgetter("details.logprobs")),
    Column("ranks", "?", Place.HOST, attrgetter("details.ranks")),
    Column("top_n", "i8", Place.BOTH, attrgetter("details.top_n")),
    Column("input_from", "i8", Place.HOST, _input_from),  # first prompt token to report, or NOT_WANTED
    Column("raw", "?", Place.HOST, attrgetter("details.raw")),
)
SAMPLING = (
    Column("is_plain", "?", Place.HOST, is_plain),
    *(Column(each.name, each.dtype, Place.BOTH, partial(read_parameter, each)) for each in PARAMETERS),
)
COLUMNS = (*STATE, *SAMPLING)
RAGGED_COLUMNS = (
    RaggedColumn("eos_token_ids", "<i4", Place.BOTH, attrgetter("eos_token_ids"), pad=-1),
    RaggedColumn("bias_token_ids", "<i4", Place.BOTH, attrgetter("sampling.bias_token_ids"), pad=-1),
    RaggedColumn("biases", "<f4", Place.BOTH, attrgetter("sampling.biases"), pad=0.0),
)
ROW = np.dtype([(column.name, column.dtype) for column in COLUMNS])


def read_row(message: pb.OpenRow) -> tuple[Any, ...]:
    """Return the fields of ROW in order."""
    return tuple(column.read(message) for column in COLUMNS)


class RaggedValues:
    """Values of a ragged column for all rows."""

    def __init__(self, column: RaggedColumn, max_rows: int):
        self._column = column
        self._values = np.full((max_rows, 0), column.pad, column.dtype)
        self.lengths = np.zeros(max_rows, np.int64)

    def open(self, row: int, message: pb.OpenRow) -> None:
        values = np.frombuffer(self._column.read(message), self._column.dtype)
        missing = max(len(values) - self._values.shape[1], 0)
        if missing:
            self._values = np.pad(self._values, ((0, 0), (0, missing)), constant_values=self._column.pad)
        self._values[row] = self._column.pad
        self._values[row, : len(values)] = values
        self.lengths[row] = len(values)

    def take(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return the lists of rows [n], padded to the longest list: [n, any]."""
        return self._values[rows, : self.lengths[rows].max(initial=0)]
