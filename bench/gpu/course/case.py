"""What is run on a GPU: stages of cases. Nothing here imports torch."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    name: str
    function: str
    """`module:function`, called with a Target and the arguments."""
    seconds: float
    """Time limit, from the start of its process."""
    arguments: tuple[str | int, ...] = ()
    is_rehearsed: bool = True
    """Whether a rehearsal on the CPU runs it."""


@dataclass(frozen=True)
class Stage:
    name: str
    seconds: float
    """Time limit of all its cases."""
    cases: tuple[Case, ...]
    num_parallel: int = 1
    """Cases at a time. Those whose time matters are alone."""
    libraries: tuple[str, ...] = ()
    """What takes seconds to import, and is imported before cases are forked."""


@dataclass(frozen=True)
class Job:
    """A case that is to be run now, as it is sent to the process that forks it."""

    stage: str
    case: str
    attempt: int
    function: str
    arguments: list[str | int]
    seconds: float
    device: str
    is_forked: bool
    """Whether its process is forked from one that has imported the libraries, or is a fresh one."""
    results: str
    log: str
    """File to which what it prints is appended."""


def find_function(name: str) -> Callable[..., Any]:
    """Return a function by `module:function`."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found
