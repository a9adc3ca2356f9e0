"""Locates and checks the soft prompts and adapters of requests, and detects changed files on every lookup."""

import logging
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from tgis.prompts.artifact_cache import ArtifactCache, Kind
from tgis.prompts.errors import AdapterError, AdapterNotFoundError, NotTunableError, TooLargeError, quote
from tgis.prompts.ids import AdapterDirectory, find_directory, has_entry, missing_as_not_found
from tgis.prompts.lora_files import (
    LORA,
    MAX_HEADER_BYTES,
    UnsupportedTypeError,
    read_adapter_files,
    split_name,
)
from tgis.prompts.snapshot import Choose, FilesState, copy_files, read_state
from tgis.prompts.soft_prompt import (
    AdapterRequirements,
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
# Shorter than the router's timeout, so that a hung disk blocks only one thread per id.
TURN_TIMEOUT_S = 4.0
_ADAPTER_ID = re.compile("[A-Za-z0-9_./-]+")


@dataclass(frozen=True)
class ArtifactInfo:
    kind: Kind
    digest: str
    num_decoder_tokens: int
    num_encoder_tokens: int
    num_bytes: int
    """Upper bound, in bytes, of a rank's memory for the loaded soft prompt or adapter."""


# A text is the reason why the soft prompt or adapter is refused.
Outcome = ArtifactInfo | str


class AdapterStore:
    """Thread-safe store of soft prompts and adapters that caches outcomes until files change."""

    def __init__(
        self,
        artifacts: ArtifactCache,
        required: AdapterRequirements | None,
        prompts: Path | None,
        adapters: Path | None,
        named: Mapping[str, Path],
        is_known: bool = False,
    ) -> None:
        """Create the store without reading the directories.

        `prompts` may contain adapters too; `named` are adapters in other directories. `required` is None if
        the model supports neither prompts nor adapters."""
        self._artifacts = artifacts
        self._required = required
        self._is_known = is_known
        takes_encoder = required is None or required.is_encoder_decoder
        self._choose: dict[Kind, Choose] = {
            "prompt": partial(choose_prompt_files, takes_encoder=takes_encoder),
            "adapter": choose_adapter_files,
        }
        self._prompts = prompts and prompts.absolute()
        self._adapters = adapters and adapters.absolute()
        self._named = {name: path.absolute() for name, path in named.items()}
        self._remembered: OrderedDict[tuple[Kind, str], tuple[FilesState, Outcome]] = OrderedDict()
        self._lock = threading.Lock()
        self._turns: set[tuple[Kind, str]] = set()
        self._turn_ended = threading.Condition(self._lock)

    def find(self, kind: Kind, id: str) -> ArtifactInfo:
        """Check the soft prompt or adapter `id`, and put a copy into the cache.

        Concurrent calls for one id read it once; each waits up to TURN_TIMEOUT_S for its turn. Raises
        AdapterError with a text for the client, and OSError."""
        if kind == "adapter" and id not in self._named:
            if not (self._prompts or self._adapters):
                raise AdapterNotFoundError("adapter_id supplied but no adapter store was configured")
            if not _ADAPTER_ID.fullmatch(id):
                rule = "must contain only alphanumeric, _ and - and /"
                raise AdapterNotFoundError(f"Invalid adapter id '{quote(id)}', {rule}")
        try:
            with self._take_turn(kind, id):
                outcome = self._find(kind, id)
        except AdapterNotFoundError as error:
            raise AdapterNotFoundError(_explain(kind, id, error)) from error
        except AdapterError as error:
            raise AdapterError(_explain(kind, id, error)) from error
        if isinstance(outcome, str):
            raise AdapterError(outcome)
        return outcome

    def refuse(self, digest: str, error: AdapterError) -> None:
        """Refuse what the model cannot load: `find` raises `error`'s text until the files change."""
        with self._lock:
            for (kind, id), (state, outcome) in list(self._remembered.items()):
                if isinstance(outcome, ArtifactInfo) and outcome.digest == digest:
                    self._remembered[kind, id] = state, _explain(kind, id, error)
                    logger.warning("%s %s is refused: %s", kind, quote(id), error)

    def _find(self, kind: Kind, id: str) -> Outcome:
        for _ in range(TRIES):
            source = self._locate(kind, id)
            try:
                return self._recall(kind, id, source) or self._read(kind, id, source)
            except AdapterNotFoundError:
                if self._locate(kind, id) == source:
                    raise
        raise AdapterNotFoundError

    def _locate(self, kind: Kind, id: str) -> AdapterDirectory:
        if kind == "adapter" and id in self._named:
            with missing_as_not_found():
                return AdapterDirectory(Path(os.path.realpath(self._named[id], strict=True)), None)
        for root in (self._prompts,) if kind == "prompt" else (self._adapters, self._prompts):
            if root is None:
                continue
            try:
                return find_directory(root, id)
            except AdapterNotFoundError:
                if has_entry(root, id):  # an unreadable entry hides entries of later roots
                    raise
        raise AdapterNotFoundError

    def _recall(self, kind: Kind, id: str, source: AdapterDirectory) -> Outcome | None:
        with self._lock:
            state, outcome = self._remembered.get((kind, id), (None, ""))
        if state is None or read_state(source.directory, self._choose[kind]) != state:
            return None
        if isinstance(outcome, ArtifactInfo) and outcome.digest not in self._artifacts:
            return None
        with self._lock:
            if (kind, id) in self._remembered:
                self._remembered.move_to_end((kind, id))
        return outcome

    def _read(self, kind: Kind, id: str, source: AdapterDirectory) -> Outcome:
        required = self._required
        if required is None:
            raise NotTunableError(self._is_known)
        with self._artifacts.temporary_directory() as copy:
            state = copy_files(source, self._choose[kind], copy, _max_file_bytes(kind, required))
            try:
                outcome: Outcome = self._check(kind, copy, required)
            except AdapterNotFoundError:
                raise
            except AdapterError as error:
                detail = str(error.__cause__ or error).replace(str(copy), str(source.directory))
                logger.warning("%s %s is refused: %s", kind, quote(id), detail)
                outcome = _explain(kind, id, error)
        if state.is_settled:
            self._remember(kind, id, state, outcome)
        return outcome

    def _check(self, kind: Kind, copy: Path, required: AdapterRequirements) -> ArtifactInfo:
        if kind == "adapter" or read_peft_type(copy) == LORA:
            tensors, scales = read_adapter_files(copy, _max_file_bytes("adapter", required))
            num_bytes = measure_adapter(tensors, required.max_adapter_bytes)
            digest = self._artifacts.put("adapter", tensors, {"scales": scales})
            return ArtifactInfo("adapter", digest, 0, 0, num_bytes)
        prompt = read_prompt(copy, required)
        num_bytes = measure_prompt(prompt, required.max_prompt_bytes)
        digest = self._artifacts.put("prompt", prompt.tensors, {})
        return ArtifactInfo("prompt", digest, _count(prompt.decoder), _count(prompt.encoder), num_bytes)

    def _remember(self, kind: Kind, id: str, state: FilesState, outcome: Outcome) -> None:
        with self._lock:
            self._remembered[kind, id] = state, outcome
            self._remembered.move_to_end((kind, id))
            if len(self._remembered) > MAX_REMEMBERED:
                self._remembered.popitem(last=False)

    @contextmanager
    def _take_turn(self, kind: Kind, id: str) -> Iterator[None]:
        with self._turn_ended:
            if not self._turn_ended.wait_for(lambda: (kind, id) not in self._turns, TURN_TIMEOUT_S):
                raise AdapterError("Timeout expired")
            self._turns.add((kind, id))
        try:
            yield
        finally:
            with self._turn_ended:
                self._turns.remove((kind, id))
                self._turn_ended.notify_all()


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


def _explain(kind: Kind, id: str, error: AdapterError) -> str:
    """Return the complete text that the client receives."""
    shown = quote(id)
    if isinstance(error, UnsupportedTypeError):
        return str(error)
    cause = str(error)
    if kind == "adapter":
        if isinstance(error, AdapterNotFoundError):
            cause = "directory does not exist"
        elif isinstance(error, TooLargeError):
            cause = f"adapter {shown} exceeds the allowed cache size"
        return f"can't retrieve adapter with id '{shown}': {cause}"
    if isinstance(error, AdapterNotFoundError):
        cause = f'prefix id "{shown}" not found'
    elif isinstance(error, TooLargeError):
        cause = f"Prefix ID object {shown} exceeds the allowed cache size"
    return f"can't retrieve prompt prefix with id '{shown}': {cause}"


def _max_file_bytes(kind: Kind, required: AdapterRequirements) -> int:
    adapter = required.max_adapter_bytes + MAX_HEADER_BYTES
    return adapter if kind == "adapter" else max(adapter, max_file_bytes(required))


def _count(tensor: Tensor | None) -> int:
    return 0 if tensor is None else len(tensor)
