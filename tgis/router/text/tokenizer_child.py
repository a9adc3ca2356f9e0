"""Main module of the tokenizer process. It answers one call at a time at low priority, so that long texts
block neither the router's interpreter nor other work on the machine."""

import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import tokenizers

from tgis.process.child import die_with
from tgis.process.memory_release import return_freed_memory
from tgis.router.errors import RequestError
from tgis.router.text.tokenization import load_tokenizer

NICENESS = 10
IDLE_S = 2.0  # idle time after which free memory is given back to the system


def main(fd: int, directory: Path, parent: int) -> None:
    """Report over the socket `fd` that the tokenizer is loaded, then answer calls until the other end
    closes."""
    die_with(parent)
    os.nice(NICENESS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # use only one core
    tokenizer = load_tokenizer(directory)
    with Connection(fd) as connection:
        connection.send(None)
        while True:
            if not connection.poll(IDLE_S):
                return_freed_memory()
            try:
                function, arguments = connection.recv()
            except EOFError:
                return
            connection.send(_answer(function, tokenizer, *arguments))
            del arguments


def _answer(function: Callable[..., object], tokenizer: tokenizers.Tokenizer, *arguments: Any) -> object:
    """Return the call's result, or the RequestError that rejects it."""
    try:
        return function(tokenizer, *arguments)
    except RequestError as error:
        # Drop the library's error as the cause, because its text may quote the input.
        return RequestError(str(error), error.parameter)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
