"""Other engines on the same checkpoint, each in a virtual environment of its own: what PyPI serves."""
