"""Explains failures for which gRPC's own text does not say what to do."""

import re

_TOO_LARGE = re.compile(
    r"(?P<side>CLIENT: |SERVER: )?(Received|Sent) message larger than max \((?P<size>\d+) vs\. (?P<max>\d+)\)"
)
_HINTS = (
    (
        "metadata size exceeds",
        "the call's metadata are too large: cache_salt, logit_bias, stop_token_ids, metadata or the token",
    ),
    ("http1.x server", "the target is an HTTP port, and this client needs the service's gRPC port"),
    ("CERTIFICATE_VERIFY_FAILED", "the service's certificate is not from a CA that the client trusts"),
    ("Hostname Verification", "the service's certificate is for another host name"),
    ("WRONG_VERSION_NUMBER", "the client uses TLS, and the service does not"),
    (
        "Socket closed",
        "the connection was lost: the service ended, one side has no TLS, or the client needs a certificate",
    ),
    ("Connection refused", "nothing listens at the target"),
)
"""Parts of gRPC's texts, and what they mean."""


def is_too_large(details: str) -> bool:
    """Return True if a call has more bytes than the service ever takes."""
    large = _TOO_LARGE.search(details)
    return "metadata size exceeds" in details or (large is not None and large["side"] != "CLIENT: ")


def explain(details: str) -> str:
    """Return a failure's text for people."""
    if large := _TOO_LARGE.search(details):
        if large["side"] == "CLIENT: ":
            return f"the answer has {large['size']} bytes, more than the channel's limit of {large['max']}"
        return f"the request has {large['size']} bytes, more than the service's limit of {large['max']}"
    hint = next((hint for part, hint in _HINTS if part in details), "")
    return f"{hint} ({details})" if hint else details or "no details"
