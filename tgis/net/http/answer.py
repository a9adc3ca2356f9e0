"""Gives the application access to the state of a response."""

from collections.abc import Callable


class Answer:
    """State of a response on its connection; the application reads it as `scope["state"]["answer"]`."""

    def __init__(self, headers: list[tuple[bytes, bytes]], has_begun: Callable[[], bool]) -> None:
        self.headers = headers
        """Headers that are sent with every response."""
        self._has_begun = has_begun

    @property
    def has_begun(self) -> bool:
        return self._has_begun()
