"""Names that clients assign to LoRA adapters at runtime. The engine owns the table; router workers have
copies."""

from collections.abc import Mapping

from tgis.router.errors import NotFoundError, RequestError

MAX_NAMES = 10_000  # each takes a few hundred bytes
NAME = "lora_name"


class AdapterNames:
    def __init__(self) -> None:
        self.ids: dict[str, str] = {}
        """Adapter ids by name."""
        self.version = 0
        """Number of changes so far."""

    def assign(self, name: str, adapter_id: str, is_replacing: bool) -> None:
        """Assign a name to an adapter. Raises RequestError if that is not allowed."""
        check_new_name(self.ids, name, is_replacing)
        self.ids[name] = adapter_id
        self.version += 1

    def remove(self, name: str) -> None:
        """Remove a name. Raises NotFoundError."""
        if name not in self.ids:
            shown = "the LoRA adapter cannot be found"
            raise NotFoundError(f"The LoRA adapter '{name[:256]}' cannot be found.", NAME, shown)
        del self.ids[name]
        self.version += 1

    def restore(self, version: int, ids: Mapping[str, str]) -> None:
        """Restore the table of a lost engine, unless this table is as recent."""
        if version > self.version:
            self.version = version
            self.ids = {**ids}


def check_new_name(ids: Mapping[str, str], name: str, is_replacing: bool) -> None:
    """Raise RequestError if the name cannot be added to the existing names `ids`."""
    if name in ids and not is_replacing:
        text = f"The LoRA adapter '{name}' has already been loaded; load_inplace replaces it."
        raise RequestError(text, NAME)
    if name not in ids and len(ids) >= MAX_NAMES:
        raise RequestError(f"{MAX_NAMES} adapters have names already; unload one.", NAME)
