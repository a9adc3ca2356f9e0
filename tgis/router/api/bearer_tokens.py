"""Reads the bearer tokens that all APIs require, and maps each token to its holder."""

import hashlib
import hmac
import logging
import re
import time
from pathlib import Path

from tgis.net.tls import file_version
from tgis.router.api.tenants import MAX_NAME_CHARS, TokenHolder, is_name
from tgis.router.errors import StartupError

logger = logging.getLogger(__name__)

SCHEME = "bearer "
REFUSAL = "a valid bearer token is required"
SPACES = " \t"  # separators in headers and lines; other whitespace is part of a token
WORD = re.compile(rf"[^{SPACES}\r]+")
CHECK_INTERVAL_S = 1.0  # minimum time between two checks of the file


class BearerTokens:
    """Bearer tokens from a file. Each line is empty, a token, `tenant NAME TOKEN` or `operator TOKEN`. The
    file is read again when it changes, so that an operator can replace tokens."""

    def __init__(self, path: str) -> None:
        """Read the file. Raises StartupError."""
        self._path = path
        self._state = file_version(path)
        self._checked_at = time.monotonic()
        self._holders = _read(path)

    def holder_of_header(self, header: str) -> TokenHolder | None:
        """Return the result of `holder_of` for the token in an `authorization` header."""
        scheme, token = header[: len(SCHEME)], header[len(SCHEME) :]
        return self.holder_of(token.strip(SPACES)) if scheme.lower() == SCHEME else None

    def holder_of(self, token: str) -> TokenHolder | None:
        """Return the holder of `token`, or None if the token is unknown. The time taken does not depend on
        how much of the token is right."""
        self._reload_if_changed()
        digest = _digest(token)
        matches = [holder for known, holder in self._holders.items() if hmac.compare_digest(digest, known)]
        return matches[0] if matches else None

    def _reload_if_changed(self) -> None:
        now = time.monotonic()
        if now - self._checked_at < CHECK_INTERVAL_S:
            return
        self._checked_at, state = now, file_version(self._path)
        if state != self._state:
            self._state = state
            try:
                self._holders = _read(self._path)
            except StartupError as error:
                logger.error("the bearer tokens were not reloaded, those read before stay valid: %s", error)


def _read(path: str) -> dict[bytes, TokenHolder]:
    """Return the holders of tokens by token digest. No error's text contains the content of a line."""
    try:
        lines = Path(path).read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"the file of bearer tokens {path} cannot be read") from error
    holders: dict[bytes, TokenHolder] = {}
    for number, words in enumerate(map(WORD.findall, lines), 1):
        match words:
            case []:
                continue
            case [token]:
                holder = TokenHolder()
            case ["operator", token]:
                holder = TokenHolder(is_operator=True)
            case ["tenant", name, token] if is_name(name):
                holder = TokenHolder(name)
            case _:
                raise StartupError(
                    f"line {number} of the file of bearer tokens {path} must be TOKEN, `operator TOKEN` or "
                    f"`tenant NAME TOKEN` with a name of at most {MAX_NAME_CHARS} characters of printable "
                    "ASCII"
                )
        if holders.setdefault(_digest(token), holder) != holder:
            raise StartupError(
                f"line {number} of the file of bearer tokens {path} has a token that another line gives to "
                "another tenant or to an operator"
            )
    if not holders:
        raise StartupError(f"the file of bearer tokens {path} has no token")
    return holders


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()
