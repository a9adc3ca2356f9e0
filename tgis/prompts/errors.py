"""What is wrong with a soft prompt or an adapter, in words that a client may read."""

from tgis.errors import OperatorError

MAX_QUOTED = 256  # characters of what a client or a file gave that are said back


class ContentError(OperatorError):
    """It cannot be used. The text is one line that tells nothing of the disk."""


class TooLargeError(ContentError):
    """More bytes than are allowed."""

    def __init__(self) -> None:
        super().__init__("it is larger than the allowed size")


class AbsentError(ContentError):
    """There is nothing of that name, or nothing that may be read."""

    def __init__(self) -> None:
        super().__init__("not found")


class NotTunableError(ContentError):
    """The model that is served takes neither."""

    def __init__(self, is_known: bool = False) -> None:
        """`is_known` tells whether the service's own engine would run the model if it were let."""
        super().__init__(
            "soft prompts and adapters need the service's own engine: leave DEPLOYMENT_FRAMEWORK unset"
            if is_known
            else "soft prompts and adapters need the service's own engine, which does not run this model"
        )


class MissingContentError(Exception):
    """No copy is kept under a digest."""


def quote(text: str) -> str:
    """As it can stand in a line that must not grow too long for a header of gRPC's."""
    shown = text if len(text) <= MAX_QUOTED else text[:MAX_QUOTED] + "..."
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)
