"""Translates the service's refusals to an API's own names of parameters."""

import re
from collections.abc import Mapping

from tgis.router.errors import RequestError


def renamed_text(error: RequestError, names: Mapping[str, str], kept: str = "") -> str:
    """Return a refusal's text with the API's own `names` of parameters. The word `kept` is not renamed."""
    own = error.log_text  # the rest may be the client's words
    shown = re.sub("[a-z_]+", lambda word: word[0] if word[0] == kept else names.get(word[0], word[0]), own)
    return shown + str(error).removeprefix(own)
