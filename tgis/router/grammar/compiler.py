"""Converts a request's constraint to the grammar that shards use. Separate processes that can be killed
compile it first, so that a harmful text neither blocks the router nor reaches a shard."""

import asyncio
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from tgis.process.worker_pool import PoolBusyError, Reply, WorkerPool
from tgis.router.errors import OVERLOADED, OverloadedError, RequestError, UnavailableError
from tgis.router.grammar.answer_rules import FREE, AnswerRules
from tgis.router.sequence import Grammar

logger = logging.getLogger(__name__)

MAX_CHOICES = 4096
WORKER = "tgis.router.grammar.worker"
NUM_WORKERS = 2
# The worker limits its own CPU time; this limit is for a worker that gets no CPU time. It is long, because
# other processes of a busy machine must not decide which constraints are served.
TIMEOUT_S = 30.0
CACHE_SIZE = 256
JSON = "JSON"  # the only format that constrains a text
TOOLS = "tools"  # request fields from which rules for whole answers come
REASONING = "max_reasoning_tokens"
ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True)
class Guided:
    """Constraint on a text as given by the client."""

    field: str
    """Request field of the constraint: format, json_schema, regex, choice or grammar; empty if only `answer`
    constrains the text."""
    text: str = ""
    choices: tuple[str, ...] = ()
    answer: AnswerRules | None = None
    """Rules for the whole answer. The constraint then applies to the text apart from reasoning and calls."""


@dataclass(frozen=True)
class Constraint:
    """Checked constraint in the form for compilation, with its request field."""

    field: str
    kind: str
    text: str
    answer: AnswerRules | None = None


def read_constraint(guided: Guided, max_bytes: int) -> Constraint | None:
    """Return the checked, uncompiled constraint, or None for free text. Raises RequestError."""
    on_text = _read_text_constraint(guided, max_bytes)
    rules = guided.answer
    if rules is None:
        return on_text
    if rules.calls is not None:
        num_bytes = sum(len(function.schema.encode()) for function in rules.calls.functions)
        _require_size(TOOLS, num_bytes + len(on_text.text.encode() if on_text else b""), max_bytes)
    if on_text is None:
        return Constraint(TOOLS if rules.calls else REASONING, FREE, "", rules)
    return replace(on_text, answer=rules)


def _read_text_constraint(guided: Guided, max_bytes: int) -> Constraint | None:
    match guided.field:
        case "":
            return None
        case "format":
            return Constraint("format", "json_schema", ANY_OBJECT) if guided.text == JSON else None
        case "choice":
            return _read_choices(guided.choices, max_bytes)
        case field:
            _require_size(field, len(guided.text.encode()), max_bytes)
            return Constraint(field, field, guided.text)


def _read_choices(choices: tuple[str, ...], max_bytes: int) -> Constraint:
    if len(choices) < 2:
        raise RequestError("Must provide at least two choices", "choice")
    if len(choices) > MAX_CHOICES:
        raise RequestError(f"choice must have at most {MAX_CHOICES} choices", "choice")
    _require_size("choice", sum(len(choice.encode()) for choice in choices), max_bytes)
    return Constraint("choice", "choice", json.dumps(choices))


def _require_size(field: str, num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise RequestError(f"{field} must have at most {max_bytes} UTF8 bytes", field)


class _Invalid(NamedTuple):
    """Text, parameter and log text of the refusal of a constraint."""

    text: str
    field: str
    log_text: str


class GrammarCompiler:
    """Compiler of constraints in separate processes, which start on first use. Concurrent calls with the same
    constraint share one compilation, and recent results are cached."""

    def __init__(self) -> None:
        self._answers: OrderedDict[bytes, Grammar | _Invalid] = OrderedDict()
        self._pending: dict[bytes, asyncio.Task[Grammar | _Invalid]] = {}
        self._pool = WorkerPool(WORKER, NUM_WORKERS, TIMEOUT_S)

    async def compile(self, constraint: Constraint, owner: Hashable = "") -> Grammar:
        """Return the grammar of a constraint. Owners are served in turn. Raises OverloadedError,
        UnavailableError if the machine is too busy, and RequestError with a one-line text if the constraint
        is invalid."""
        key = hashlib.sha256(msgspec.json.encode(constraint)).digest()
        answer = self._answers.get(key)
        if answer is None:
            if key not in self._pending:
                self._pending[key] = asyncio.create_task(self._compile(key, constraint, owner))
            try:
                answer = await asyncio.shield(self._pending[key])
            except PoolBusyError:
                raise OverloadedError(OVERLOADED) from None
        else:
            self._answers.move_to_end(key)
        if isinstance(answer, _Invalid):
            raise RequestError(*answer)
        return answer

    def close(self) -> None:
        """Stop all workers. `compile` must not be called afterwards."""
        self._pool.close()

    async def _compile(self, key: bytes, constraint: Constraint, owner: Hashable) -> Grammar | _Invalid:
        """Return a grammar, or its refusal. Raises PoolBusyError and UnavailableError."""
        try:
            rules = msgspec.to_builtins(constraint.answer)
            reply = await self._pool.ask([constraint.kind, constraint.text, rules], owner)
        finally:
            del self._pending[key]
        if reply.is_late:
            raise UnavailableError(
                f"{constraint.field} was not compiled in time, because the service's machine is busy"
            )
        answer = _read_answer(reply, constraint.field)
        if not reply.is_killed:
            self._answers[key] = answer
            if len(self._answers) > CACHE_SIZE:
                self._answers.popitem(last=False)
        return answer


def _read_answer(reply: Reply, field: str) -> Grammar | _Invalid:
    if reply.is_dead:
        text = f"{field} is too complex"
        return _Invalid(text, field, text)
    if "error" in reply.value:
        name = reply.value["field"] or field
        text = f"{name} is not valid: {reply.value['error']}"
        return _Invalid(text, name, f"{name} is not valid" if reply.value["quotes"] else text)
    if reply.value["has_unknown_formats"]:
        logger.info("a JSON schema has unsupported formats, which allow any string")
    text = reply.value["grammar"]
    return Grammar(text, hashlib.sha256(text.encode()).hexdigest(), field)
