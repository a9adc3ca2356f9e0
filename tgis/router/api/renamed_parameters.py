"""Translates the service's refusals to an API's own names of parameters."""

import re
from collections.abc import Mapping

from tgis.router.errors import RequestError

_STOPS = re.compile(
    r"can specify at most (\d+) non-empty stop sequences, each not more than (\d+) UTF8 bytes"
)
_PLAIN_STOPS = r"stop_sequences must have at most \1 texts, each of 1 to \2 UTF8 bytes"


def renamed_text(error: RequestError, names: Mapping[str, str], kept: str = "") -> str:
    """Return a refusal's text with the API's own `names` of parameters. The word `kept` is not renamed."""
    text = str(error)
    if not text.startswith(error.log_text):
        return text  # it quotes the request, whose words stay
    return renamed_log_text(error, names, kept) + text.removeprefix(error.log_text)


def renamed_log_text(error: RequestError, names: Mapping[str, str], kept: str = "") -> str:
    """Return a refusal's text for the log, renamed as by `renamed_text`."""

    def rename(word: re.Match[str]) -> str:
        return word[0] if word[0] == kept else names.get(word[0], word[0])

    return re.sub("[a-z_]+", rename, plain_text(error.log_text))


def plain_text(text: str) -> str:
    """Return a refusal without TGIS's own words, which only fmaas needs."""
    return _STOPS.sub(_PLAIN_STOPS, text.removeprefix("tokenizer error "))
