"""The answer to a request, as its connection sees it."""

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class Answer:
    """The answer to a request, as its connection sees it; `scope["state"]["answer"]`."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self.headers = cycle.default_headers = list(cycle.default_headers)
        """Headers that are sent whatever the answer is."""

    @property
    def has_begun(self) -> bool:
        return self._cycle.response_started
