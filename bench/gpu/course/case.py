"""Defines stages and cases of a run on a GPU. Nothing here imports torch."""

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
    """Time limit, from the start of the case's process."""
    arguments: tuple[str | int, ...] = ()
    is_rehearsed: bool = True
    """True if a rehearsal on the CPU runs the case."""


@dataclass(frozen=True)
class Stage:
    name: str
    seconds: float
    """Time limit of all cases of the stage."""
    cases: tuple[Case, ...]
    num_parallel: int = 1
    """Number of cases that run at a time; 1 if their time is measured."""
    libraries: tuple[str, ...] = ()
    """Libraries that take seconds to import, and are imported before cases are forked."""


@dataclass(frozen=True)
class Job:
    """Case to run now, as sent to the process that forks it."""

    stage: str
    case: str
    attempt: int
    function: str
    arguments: list[str | int]
    seconds: float
    device: str
    is_forked: bool
    """True if the case's process is forked from one that has imported the libraries; False: a new process."""
    results: str
    log: str
    """File to which the case's output is appended."""


def find_function(name: str) -> Callable[..., Any]:
    """Return a function by `module:function`."""
    module, _, function = name.partition(":")
    attribute: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return attribute
