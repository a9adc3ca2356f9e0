"""Names of adapters in several processes. The engine process has the table, and each router worker a copy. A
change is answered once all workers know it. Any worker can restore the table after a loss of the engine."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tgis.router.adapters.names import AdapterNames
from tgis.router.engine.handle import Ticket
from tgis.router.errors import RequestError
from tgis.router.remote import messages as wire

Send = Callable[[Any], None]


class _Waiting(NamedTuple):
    version: int
    ticket: Ticket
    reply: Send


class SharedNames:
    """The engine's part."""

    def __init__(self, names: AdapterNames) -> None:
        self._names = names
        self._known: dict[Send, int] = {}
        """Versions that the workers have, by what sends to them."""
        self._waiting: list[_Waiting] = []

    def add(self, send: Send) -> None:
        """Send the table to a worker that has connected."""
        self._known[send] = 0
        send(wire.Names(self._names.version, self._names.ids))

    def remove(self, send: Send) -> None:
        """Forget a worker whose connection has ended: it gets the table again before it serves others."""
        self._known.pop(send, None)
        self._answer()

    def restore(self, version: int, ids: Mapping[str, str]) -> None:
        """Take over a worker's copy before the engine has started, or if no worker had any until now."""
        if self._known and self._names.version:
            return
        self._names.restore(version, ids)
        for send in self._known:
            send(wire.Names(self._names.version, self._names.ids))

    def change(self, message: wire.ChangeName, reply: Send) -> None:
        """Change the table, and reply soon."""
        names, name, adapter_id = self._names, message.name, message.adapter_id
        try:
            if message.is_again and names.ids.get(name) == adapter_id:
                pass  # the engine that was lost has made the change
            elif adapter_id is None:
                names.remove(name)
            else:
                names.assign(name, adapter_id, message.is_replacing)
        except RequestError as error:
            reply(wire.refused(message.ticket, error))
            return
        for send in self._known:
            send(wire.NameChanged(names.version, name, adapter_id))
        self._waiting.append(_Waiting(names.version, message.ticket, reply))

    def note(self, send: Send, version: int) -> None:
        """Note that a worker has this version."""
        if send in self._known:
            self._known[send] = version
            self._answer()

    def _answer(self) -> None:
        oldest = min(self._known.values(), default=self._names.version)
        answered = [each for each in self._waiting if each.version <= oldest]
        self._waiting = [each for each in self._waiting if each.version > oldest]
        for each in answered:
            each.reply(wire.Named(each.ticket))


class NamesCopy:
    """A worker's part."""

    def __init__(self) -> None:
        self.names = AdapterNames()

    def take(self, message: wire.Names | wire.NameChanged) -> wire.NamesKnown:
        """Follow the engine's table, and return the answer."""
        names = self.names
        if isinstance(message, wire.Names):
            names.ids = {**message.ids}
        elif message.adapter_id is None:
            names.ids.pop(message.name, None)
        else:
            names.ids[message.name] = message.adapter_id
        names.version = message.version
        return wire.NamesKnown(message.version)
