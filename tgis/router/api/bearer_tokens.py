"""Reads the bearer tokens that all APIs require, the holder of each token, and the limits of tenants."""

import hmac
import logging
import re
import secrets
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tgis.config.option import LARGEST
from tgis.config.serving import MIN_PRIORITY
from tgis.net.tls import file_version, is_temporary
from tgis.router.api.tenants import MAX_NAME_CHARS, TenantRules, TokenHolder, is_name
from tgis.router.errors import StartupError

logger = logging.getLogger(__name__)

SCHEME = "bearer "
REFUSAL = "a valid bearer token is required"
SPACES = " \t"  # separators in headers and lines; other whitespace is part of a token
WORD = re.compile(rf"[^{SPACES}\r]+")
MINIMUMS = {
    "priority-floor": MIN_PRIORITY,
    "requests-per-minute": 1,
    "tokens-per-minute": 1,
    "concurrent-requests": 1,
}
"""Names and minimum values of a tenant's limits."""
RULE_VALUE = re.compile("-?[0-9]{1,10}")
_KEY = secrets.token_bytes(32)  # clients that measure look-ups cannot compute digests without it
CHECK_INTERVAL_S = 1.0  # minimum time between two checks of the file


class BearerTokens:
    """Bearer tokens from a file. Each line is empty, a token, `tenant NAME TOKEN`, `operator TOKEN`, or
    `limits NAME` with the tenant's limits. The file is read again when it changes, so that an operator can
    replace tokens."""

    def __init__(self, path: str) -> None:
        """Read the file. Raises StartupError."""
        self._path = path
        self._state = file_version(path)
        self._checked_at = time.monotonic()
        self._content = _read(path)

    def holder_of_header(self, header: str) -> TokenHolder | None:
        """Return the result of `holder_of` for the token in an `authorization` header."""
        scheme, token = header[: len(SCHEME)], header[len(SCHEME) :]
        return self.holder_of(token.strip(SPACES)) if scheme.lower() == SCHEME else None

    def holder_of(self, token: str) -> TokenHolder | None:
        """Return the holder of `token`, or None if the token is unknown. The time taken does not depend on
        how much of the token is right, nor on the number of tokens."""
        self._reload_if_changed()
        return self._content.holders.get(_digest(token))

    def rules_of(self, tenant: str, default: TenantRules) -> TenantRules:
        """Return a tenant's rules: those of the file, and the default for all others."""
        own = self._content.rules.get(tenant)
        return replace(default, **own) if own else default

    def _reload_if_changed(self) -> None:
        now = time.monotonic()
        if now - self._checked_at < CHECK_INTERVAL_S:
            return
        self._checked_at, state = now, file_version(self._path)
        if state != self._state:
            self._state = state
            try:
                self._content = _read(self._path)
            except StartupError as error:
                if is_temporary(error):
                    self._state = None  # read it again at the next check
                logger.error("the bearer tokens were not reloaded, those read before stay valid: %s", error)


class _TokenFile(NamedTuple):
    """Content of the file."""

    holders: dict[bytes, TokenHolder]
    """Holders by digest of the token."""
    rules: dict[str, dict[str, int]]
    """Fields of TenantRules by tenant."""


def _read(path: str) -> _TokenFile:
    """Read the file. No error's text contains the content of a line. Raises StartupError."""
    try:
        lines = Path(path).read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"the file of bearer tokens {path} cannot be read") from error
    content = _TokenFile({}, {})
    for number, line in enumerate(lines, 1):
        place = f"line {number} of the file of bearer tokens {path}"
        if "\0" in line:
            raise StartupError(f"{place} contains U+0000")
        _read_line(WORD.findall(line), place, content)
    if not content.holders:
        raise StartupError(f"the file of bearer tokens {path} has no token")
    return content


def _read_line(words: list[str], place: str, content: _TokenFile) -> None:
    """Add a line to the content. Raises StartupError, which names the line's place."""
    match words:
        case []:
            return
        case [token]:
            holder = TokenHolder()
        case ["operator", token]:
            holder = TokenHolder(is_operator=True)
        case ["tenant", name, token] if is_name(name):
            holder = TokenHolder(name)
        case ["limits", name, _, *_] if is_name(name):
            rules = _read_rules(words[2:])
            if rules is None or content.rules.setdefault(name, rules) is not rules:
                raise StartupError(
                    f"{place} must be `limits NAME` once per tenant, with values of {', '.join(MINIMUMS)}, "
                    "as KEY=NUMBER"
                )
            return
        case _:
            raise StartupError(
                f"{place} must be TOKEN, `operator TOKEN` or `tenant NAME TOKEN` "
                f"with a name of at most {MAX_NAME_CHARS} characters of printable ASCII"
            )
    if content.holders.setdefault(_digest(token), holder) != holder:
        raise StartupError(f"{place} has a token that another line gives to another tenant or to an operator")


def _read_rules(words: list[str]) -> dict[str, int] | None:
    """Return the fields of TenantRules, or None if a word is not one of them with a valid value."""
    rules: dict[str, int] = {}
    for word in words:
        key, _, text = word.partition("=")
        minimum = MINIMUMS.get(key)
        if minimum is None or not RULE_VALUE.fullmatch(text) or not minimum <= int(text) <= LARGEST:
            return None
        rules[key.replace("-", "_")] = int(text)
    return rules if len(rules) == len(words) else None


def _digest(token: str) -> bytes:
    return hmac.digest(_KEY, token.encode(errors="replace"), "sha256")
