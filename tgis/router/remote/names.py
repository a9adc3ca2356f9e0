"""Adapter names shared by several processes. The engine process owns the table, and each router worker has a
copy. A change is answered when all workers know it. After a loss of the engine, any worker can restore the
table."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tgis.router.adapters.names import AdapterNames
from tgis.router.engine.handle import ClaimId
from tgis.router.errors import RequestError
from tgis.router.remote import messages as wire

Send = Callable[[Any], None]


class _Waiting(NamedTuple):
    version: int
    claim_id: ClaimId
    reply: Send


class SharedNames:
    """Engine's side: the table and the versions of the copies."""

    def __init__(self, names: AdapterNames) -> None:
        self._names = names
        self._known: dict[Send, int] = {}
        """Versions of the workers' copies, by the worker's send function."""
        self._waiting: list[_Waiting] = []

    def add(self, send: Send) -> None:
        """Send the table to a newly connected worker."""
        self._known[send] = 0
        send(wire.Names(self._names.version, self._names.ids))

    def remove(self, send: Send) -> None:
        """Forget a disconnected worker. It gets the table again when it reconnects."""
        self._known.pop(send, None)
        self._answer()

    def restore(self, version: int, ids: Mapping[str, str]) -> None:
        """Restore the table from a worker's copy, before the engine has started or if the table is still
        empty."""
        if self._known and self._names.version:
            return
        self._names.restore(version, ids)
        for send in self._known:
            send(wire.Names(self._names.version, self._names.ids))

    def change(self, message: wire.ChangeName, reply: Send) -> None:
        """Change the table, and reply when all workers know the change."""
        names = self._names
        name = message.name
        adapter_id = message.adapter_id
        try:
            if message.is_again and names.ids.get(name) == adapter_id:
                pass  # the lost engine has already made the change
            elif adapter_id is None:
                names.remove(name)
            else:
                names.assign(name, adapter_id, message.is_replacing)
        except RequestError as error:
            reply(wire.refused(message.claim_id, error))
            return
        for send in self._known:
            send(wire.NameChanged(names.version, name, adapter_id))
        self._waiting.append(_Waiting(names.version, message.claim_id, reply))

    def note(self, send: Send, version: int) -> None:
        """Record the version of a worker's copy."""
        if send in self._known:
            self._known[send] = version
            self._answer()

    def _answer(self) -> None:
        oldest = min(self._known.values(), default=self._names.version)
        answered = [each for each in self._waiting if each.version <= oldest]
        self._waiting = [each for each in self._waiting if each.version > oldest]
        for each in answered:
            each.reply(wire.Named(each.claim_id))


class NamesCopy:
    """Worker's side: the copy."""

    def __init__(self) -> None:
        self.names = AdapterNames()

    def take(self, message: wire.Names | wire.NameChanged) -> wire.NamesKnown:
        """Update the copy, and return the acknowledgement."""
        names = self.names
        if isinstance(message, wire.Names):
            names.ids = {**message.ids}
        elif message.adapter_id is None:
            names.ids.pop(message.name, None)
        else:
            names.ids[message.name] = message.adapter_id
        names.version = message.version
        return wire.NamesKnown(message.version)
