"""Errors of constraints."""

TOO_DEEP = "it is nested too deeply"


class InvalidGrammarError(Exception):
    """Fault of a grammar. The text is one line that says what is wrong."""

    def __init__(self, text: str, field: str = "") -> None:
        """Name the field of the request that is to blame, if it is not the one that states the constraint."""
        super().__init__(text)
        self.field = field
