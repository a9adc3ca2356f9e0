"""Main module of the tokenizer process. It answers one call at a time at low priority, so that long texts
block neither the router's interpreter nor other work on the machine."""

import os
import pickle
import sys
from functools import partial
from pathlib import Path

import tokenizers

from tgis.process.child import die_with
from tgis.process.memory.release import return_freed_memory
from tgis.process.worker import answer_requests
from tgis.router.errors import RequestError
from tgis.router.text.tokenization import load_tokenizer

NICENESS = 10


def main(directory: Path, parent: int) -> None:
    die_with(parent)
    os.nice(NICENESS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # use only one core
    answer_requests(partial(_answer, load_tokenizer(directory)), return_freed_memory)


def _answer(tokenizer: tokenizers.Tokenizer, call: bytes) -> bytes:
    """Return the call's result, or the RequestError that rejects it."""
    function, arguments = pickle.loads(call)  # noqa: S301  # only the router writes here
    try:
        result = function(tokenizer, *arguments)
    except RequestError as error:
        # Drop the library's error as the cause, because its text may quote the input.
        result = RequestError(str(error), error.parameter, error.log_text)
    return pickle.dumps(result)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
