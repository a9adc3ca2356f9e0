"""Translates the service's refusals to an API's own names of parameters."""

import re
from collections.abc import Mapping

from tgis.router.errors import RequestError


def renamed_text(error: RequestError, names: Mapping[str, str], kept: str = "") -> str:
    """Return a refusal's text with the API's own `names` of parameters. The word `kept` is not renamed."""
    # The rest may be the client's words.
    return renamed_log_text(error, names, kept) + str(error).removeprefix(error.log_text)


def renamed_log_text(error: RequestError, names: Mapping[str, str], kept: str = "") -> str:
    """Return the part of a refusal's text that may be logged, renamed as by `renamed_text`."""

    def rename(word: re.Match[str]) -> str:
        return word[0] if word[0] == kept else names.get(word[0], word[0])

    return re.sub("[a-z_]+", rename, error.log_text)
