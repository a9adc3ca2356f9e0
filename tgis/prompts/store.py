"""Finds the soft prompts and adapters that requests name, and checks them.

Replaced and removed files are noticed at the next request for them."""

import logging
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor

from tgis.prompts.artifact_cache import Kind, Spool
from tgis.prompts.errors import AbsentError, ContentError, NotTunableError, TooLargeError, quote
from tgis.prompts.ids import Place, absence, find_place, is_named
from tgis.prompts.lora_files import (
    LORA,
    MAX_HEADER_BYTES,
    UnsupportedTypeError,
    read_adapter_files,
    split_name,
)
from tgis.prompts.snapshot import Choose, State, look, take
from tgis.prompts.soft_prompt import (
    Fit,
    SoftPrompt,
    choose_adapter_files,
    choose_prompt_files,
    max_file_bytes,
    read_peft_type,
    read_prompt,
)

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 4096
TRIES = 3  # if a link is changed while its target is read
ALIGNMENT = 512  # bytes, of allocations in a device's memory
ADAPTER_ITEMSIZE = 4  # ranks keep adapters in float32
# Shorter than the router's timeout, so that on a disk that hangs only one thread per id is blocked.
TURN_TIMEOUT_S = 4.0
_ADAPTER_ID = re.compile("[A-Za-z0-9_./-]+")


@dataclass(frozen=True)
class Found:
    kind: Kind
    digest: str
    num_decoder_tokens: int
    num_encoder_tokens: int
    num_bytes: int
    """Upper bound of the memory that a rank needs to have it loaded, in bytes."""


# A text says why the soft prompt or adapter is refused.
Outcome = Found | str


@dataclass
class _Turn:
    lock: threading.Lock = field(default_factory=threading.Lock)
    num_waiting: int = 0


class Store:
    """Store of soft prompts and adapters by id. Safe to use from any thread.

    The result of reading files is remembered until they change."""

    def __init__(
        self,
        spool: Spool,
        fit: Fit | None,
        prompts: Path | None,
        adapters: Path | None,
        named: Mapping[str, Path],
        is_known: bool = False,
    ) -> None:
        """Take the directories without reading them.

        `prompts` is the directory of soft prompts, which may hold adapters too, and `adapters` that of
        adapters. `named` maps names to adapters anywhere on the disk. `fit` is None if the model takes
        neither soft prompts nor adapters. `is_known` is passed to NotTunableError."""
        self._spool, self._fit, self._is_known = spool, fit, is_known
        self._prompts, self._adapters = (root and root.absolute() for root in (prompts, adapters))
        self._named = {name: path.absolute() for name, path in named.items()}
        self._remembered: OrderedDict[tuple[Kind, str], tuple[State, Outcome]] = OrderedDict()
        self._turns: dict[tuple[Kind, str], _Turn] = {}
        self._lock = threading.Lock()

    def find(self, kind: Kind, id: str) -> Found:
        """Find and check the soft prompt or adapter `id`, and keep a copy in the spool.

        Concurrent calls for one id read it once; each waits at most TURN_TIMEOUT_S for its turn.

        Raises ContentError with a text for the client, and OSError."""
        if kind == "adapter" and id not in self._named:
            if not (self._prompts or self._adapters):
                raise ContentError("adapter_id supplied but no adapter store was configured")
            if not _ADAPTER_ID.fullmatch(id):
                rule = "must contain only alphanumeric, _ and - and /"
                raise ContentError(f"Invalid adapter id '{quote(id)}', {rule}")
        try:
            with self._take_turn(kind, id):
                outcome = self._find(kind, id)
        except ContentError as error:
            raise ContentError(_explain(kind, id, error)) from error
        if isinstance(outcome, str):
            raise ContentError(outcome)
        return outcome

    def refuse(self, digest: str, error: ContentError) -> None:
        """Refuse the soft prompt or adapter with that digest, because the model cannot load it.

        Later calls of `find` raise ContentError with the text of `error` until the files change."""
        with self._lock:
            for (kind, id), (state, outcome) in list(self._remembered.items()):
                if isinstance(outcome, Found) and outcome.digest == digest:
                    self._remembered[kind, id] = state, _explain(kind, id, error)
                    logger.warning("%s %s is refused: %s", kind, quote(id), error)

    def _find(self, kind: Kind, id: str) -> Outcome:
        for _ in range(TRIES):
            place = self._locate(kind, id)
            try:
                return self._recall(kind, id, place) or self._read(kind, id, place)
            except AbsentError:
                if self._locate(kind, id) == place:
                    raise
        raise AbsentError

    def _locate(self, kind: Kind, id: str) -> Place:
        if kind == "adapter" and id in self._named:
            with absence():
                return Place(Path(os.path.realpath(self._named[id], strict=True)), None)
        for root in (self._prompts,) if kind == "prompt" else (self._adapters, self._prompts):
            try:
                if root is not None:
                    return find_place(root, id)
            except AbsentError:
                if root is not None and is_named(root, id):  # a forbidden entry hides those of later roots
                    raise
        raise AbsentError

    def _recall(self, kind: Kind, id: str, place: Place) -> Outcome | None:
        with self._lock:
            state, outcome = self._remembered.get((kind, id), (None, ""))
        if state is None or look(place.directory, self._choose(kind)) != state:
            return None
        if isinstance(outcome, Found) and outcome.digest not in self._spool:
            return None
        with self._lock:
            if (kind, id) in self._remembered:
                self._remembered.move_to_end((kind, id))
        return outcome

    def _read(self, kind: Kind, id: str, place: Place) -> Outcome:
        fit = self._fit
        if fit is None:
            raise NotTunableError(self._is_known)
        with self._spool.room() as room:
            state = take(place, self._choose(kind), room, _max_file_bytes(kind, fit))
            try:
                outcome: Outcome = self._keep(kind, room, fit)
            except AbsentError:
                raise
            except ContentError as error:
                detail = str(error.__cause__ or error).replace(str(room), str(place.directory))
                logger.warning("%s %s is refused: %s", kind, quote(id), detail)
                outcome = _explain(kind, id, error)
        if state.is_settled:
            self._remember(kind, id, state, outcome)
        return outcome

    def _keep(self, kind: Kind, room: Path, fit: Fit) -> Found:
        if kind == "adapter" or read_peft_type(room) == LORA:
            tensors, scales = read_adapter_files(room, _max_file_bytes("adapter", fit))
            num_bytes = measure_adapter(tensors, fit.max_adapter_bytes)
            return Found("adapter", self._spool.put("adapter", tensors, {"scales": scales}), 0, 0, num_bytes)
        prompt = read_prompt(room, fit)
        num_bytes = measure_prompt(prompt, fit.max_prompt_bytes)
        digest = self._spool.put("prompt", prompt.tensors, {})
        return Found("prompt", digest, _count(prompt.decoder), _count(prompt.encoder), num_bytes)

    def _remember(self, kind: Kind, id: str, state: State, outcome: Outcome) -> None:
        with self._lock:
            self._remembered[kind, id] = state, outcome
            self._remembered.move_to_end((kind, id))
            if len(self._remembered) > MAX_REMEMBERED:
                self._remembered.popitem(last=False)

    def _choose(self, kind: Kind) -> Choose:
        if kind == "adapter":
            return choose_adapter_files
        return partial(choose_prompt_files, takes_encoder=self._fit is None or self._fit.is_encoder_decoder)

    @contextmanager
    def _take_turn(self, kind: Kind, id: str) -> Iterator[None]:
        with self._lock:
            turn = self._turns.setdefault((kind, id), _Turn())
            turn.num_waiting += 1
        try:
            if not turn.lock.acquire(timeout=TURN_TIMEOUT_S):
                raise ContentError("Timeout expired")
            try:
                yield
            finally:
                turn.lock.release()
        finally:
            with self._lock:
                turn.num_waiting -= 1
                if not turn.num_waiting:
                    del self._turns[kind, id]


def measure_prompt(prompt: SoftPrompt, max_bytes: int) -> int:
    """Return the bytes that a rank needs for the loaded soft prompt. Raises TooLargeError."""
    return _measure((tensor.nbytes for tensor in prompt.tensors.values()), max_bytes)


def measure_adapter(tensors: Mapping[str, Tensor], max_bytes: int) -> int:
    """Return an upper bound of the bytes that a rank needs for the loaded adapter. Raises TooLargeError."""
    # Copies of the model's own weights ("base") are compared with the model and not kept.
    kept = (tensor for name, tensor in tensors.items() if split_name(name)[1] != "base")
    return _measure((tensor.numel() * ADAPTER_ITEMSIZE for tensor in kept), max_bytes)


def _measure(sizes: Iterable[int], max_bytes: int) -> int:
    total = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
    if total > max_bytes:
        raise TooLargeError
    return total


def _explain(kind: Kind, id: str, error: ContentError) -> str:
    """Return the whole text that the client gets."""
    shown = quote(id)
    if isinstance(error, UnsupportedTypeError):
        return str(error)
    cause = str(error)
    if kind == "adapter":
        if isinstance(error, AbsentError):
            cause = "directory does not exist"
        elif isinstance(error, TooLargeError):
            cause = f"adapter {shown} exceeds the allowed cache size"
        return f"can't retrieve adapter with id '{shown}': {cause}"
    if isinstance(error, AbsentError):
        cause = f'prefix id "{shown}" not found'
    elif isinstance(error, TooLargeError):
        cause = f"Prefix ID object {shown} exceeds the allowed cache size"
    return f"can't retrieve prompt prefix with id '{shown}': {cause}"


def _max_file_bytes(kind: Kind, fit: Fit) -> int:
    adapter = fit.max_adapter_bytes + MAX_HEADER_BYTES
    return adapter if kind == "adapter" else max(adapter, max_file_bytes(fit))


def _count(tensor: Tensor | None) -> int:
    return 0 if tensor is None else len(tensor)
