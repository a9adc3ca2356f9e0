"""Errors in constraints."""

TOO_DEEP = "it is nested too deeply"


class InvalidGrammarError(Exception):
    """Error in a grammar. The text is one line that describes it."""

    def __init__(self, text: str, field: str = "", *, quotes: bool = False) -> None:
        """Create an error in the request's `field`, if that is not the constraint's own field. `quotes` is
        True if the text may have parts of the grammar."""
        super().__init__(text)
        self.field = field
        self.quotes = quotes
