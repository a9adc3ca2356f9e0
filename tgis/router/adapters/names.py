"""Names that clients give LoRA adapters while the service runs. The engine has the table, router workers have
copies."""

from collections.abc import Mapping

from tgis.router.errors import NotFoundError, RequestError

MAX_NAMES = 10_000  # each takes some hundred bytes
NAME = "lora_name"


class AdapterNames:
    def __init__(self) -> None:
        self.ids: dict[str, str] = {}
        """Ids of adapters by name."""
        self.version = 0
        """Number of changes; 0 if nobody ever gave a name."""

    def give(self, name: str, adapter_id: str, is_replacing: bool) -> None:
        """Give an adapter a name. Raises RequestError if it may not get it."""
        check_new_name(self.ids, name, is_replacing)
        self.ids[name] = adapter_id
        self.version += 1

    def take_away(self, name: str) -> None:
        """Take a name away. Raises NotFoundError."""
        if name not in self.ids:
            raise NotFoundError(f"The LoRA adapter '{name[:256]}' cannot be found.", NAME)
        del self.ids[name]
        self.version += 1

    def restore(self, version: int, ids: Mapping[str, str]) -> None:
        """Take over the table of an engine that was lost, unless this one is as new."""
        if version > self.version:
            self.version, self.ids = version, {**ids}


def check_new_name(ids: Mapping[str, str], name: str, is_replacing: bool) -> None:
    """Raise RequestError if an adapter may not get the name beside those that exist."""
    if name in ids and not is_replacing:
        text = f"The LoRA adapter '{name}' has already been loaded; load_inplace replaces it."
        raise RequestError(text, NAME)
    if name not in ids and len(ids) >= MAX_NAMES:
        raise RequestError(f"{MAX_NAMES} adapters have names already; unload one.", NAME)
