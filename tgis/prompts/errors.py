"""Errors of soft prompts and adapters. Clients receive their texts."""

from tgis.errors import OperatorError

MAX_QUOTED = 256  # characters of a client's or a file's text that an error quotes


class AdapterError(OperatorError):
    """Error for a soft prompt or adapter that cannot be used; its line reveals nothing about the disk."""


class TooLargeError(AdapterError):
    def __init__(self) -> None:
        super().__init__("it is larger than the allowed size")


class AdapterNotFoundError(AdapterError):
    """Error for an id that does not exist or whose files may not be read."""

    def __init__(self, text: str = "not found") -> None:
        super().__init__(text)


class NotTunableError(AdapterError):
    """Error for a served model that supports neither soft prompts nor adapters."""

    def __init__(self, is_known: bool = False) -> None:
        """Choose the text; `is_known` is true if the service's own engine could run the model."""
        super().__init__(
            "soft prompts and adapters need the service's own engine: leave DEPLOYMENT_FRAMEWORK unset"
            if is_known
            else "soft prompts and adapters need the service's own engine, which does not run this model"
        )


class MissingArtifactError(Exception):
    """Error for a digest without a copy."""


def quote(text: str) -> str:
    """Return the text as one printable line, cut so that an error fits into a gRPC header."""
    shown = text if len(text) <= MAX_QUOTED else text[:MAX_QUOTED] + "..."
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)
