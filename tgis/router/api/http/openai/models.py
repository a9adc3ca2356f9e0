"""Names that requests may give as `model`: those of the served model, and LoRA adapters' ids."""

from typing import NamedTuple


class ModelChoice(NamedTuple):
    name: str
    """Name that answers repeat."""
    adapter_id: str | None = None


class Models:
    def __init__(self, names: tuple[str, ...]) -> None:
        """Take the served names; answers to requests that name no model have the first."""
        self.names = names

    def choose(self, name: str | None) -> ModelChoice:
        """Return what a request's `model` names: the served model, else the adapter of that id."""
        if not name:
            return ModelChoice(self.names[0])
        return ModelChoice(name, None if name in self.names else name)
