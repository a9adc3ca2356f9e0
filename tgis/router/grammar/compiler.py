"""Turns a request's constraint into the grammar that shards follow. It is compiled first in processes that
can be killed, so that no text can block the router or reach a shard that it would harm."""

import asyncio
import contextlib
import hashlib
import json
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from tgis.router.errors import QuotingError, RequestError
from tgis.router.sequence import Grammar

MAX_CHOICES = 4096
NUM_WORKERS = 2
# The worker limits its own computing time; this limit is for a worker that gets no CPU time.
TIMEOUT_S = 5.0
CACHE_SIZE = 256
JSON = "JSON"  # the only format that constrains a text
ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True)
class Guided:
    """Constraint on a text as the client states it."""

    field: str
    """Field of the request that states it: format, json_schema, regex, choice or grammar."""
    text: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Constraint:
    """Checked constraint on a text in the form that is compiled, and the field that states it."""

    field: str
    kind: str
    text: str


def read_constraint(guided: Guided | None, max_bytes: int) -> Constraint | None:
    """Return the checked, uncompiled constraint, or None for free text. Raises RequestError."""
    if guided is None:
        return None
    match guided.field:
        case "format":
            return Constraint("format", "json_schema", ANY_OBJECT) if guided.text == JSON else None
        case "choice":
            return _read_choices(guided.choices, max_bytes)
        case field:
            _require_size(field, len(guided.text.encode()), max_bytes)
            return Constraint(field, field, guided.text)


def _read_choices(choices: tuple[str, ...], max_bytes: int) -> Constraint:
    if len(choices) < 2:
        raise RequestError("Must provide at least two choices")
    if len(choices) > MAX_CHOICES:
        raise RequestError(f"choice must not have more than {MAX_CHOICES} choices")
    _require_size("choice", sum(len(choice.encode()) for choice in choices), max_bytes)
    return Constraint("choice", "choice", json.dumps(choices))


def _require_size(field: str, num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise RequestError(f"{field} must not be more than {max_bytes} UTF8 bytes")


class GrammarCompiler:
    """Compiler of constraints off the event loop. It compiles each once, however many calls ask for it, and
    caches the newest answers. It owns its threads and processes, which start when they are needed."""

    def __init__(self) -> None:
        self._answers: OrderedDict[bytes, Grammar | str] = OrderedDict()
        self._pending: dict[bytes, asyncio.Task[Grammar | str]] = {}
        self._threads = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="guided")
        self._idle: SimpleQueue[GrammarWorker] = SimpleQueue()
        self._workers: set[GrammarWorker] = set()
        self._is_closed = False

    async def compile(self, constraint: Constraint) -> Grammar:
        """Return the grammar of a constraint. Raises RequestError, in one line, if it cannot be served."""
        key = hashlib.sha256(f"{constraint.field} {constraint.text}".encode()).digest()
        answer = self._answers.get(key)
        if answer is None:
            if key not in self._pending:
                self._pending[key] = asyncio.create_task(self._compile(key, constraint))
            answer = await asyncio.shield(self._pending[key])
        else:
            self._answers.move_to_end(key)
        if isinstance(answer, str):
            raise QuotingError(f"{constraint.field} {answer}")
        return answer

    def close(self) -> None:
        """Stop all workers. Nothing may be compiled afterwards."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in list(self._workers):
            worker.kill()
            worker.end()

    async def _compile(self, key: bytes, constraint: Constraint) -> Grammar | str:
        """Return a grammar, or a text that says what is wrong with the constraint."""
        try:
            loop = asyncio.get_running_loop()
            line, code = await loop.run_in_executor(self._threads, self._ask, constraint)
        finally:
            del self._pending[key]
        answer = _read_answer(line, constraint.field) if line else "is too complex"
        if code != -signal.SIGKILL:  # else a busy machine may be to blame, and not the constraint
            self._answers[key] = answer
            if len(self._answers) > CACHE_SIZE:
                self._answers.popitem(last=False)
        return answer

    def _ask(self, constraint: Constraint) -> tuple[bytes, int]:
        """Return a worker's line and 0, or an empty line and the worker's exit status. If the worker was
        killed, a second one is tried."""
        for _ in range(2):
            worker = self._take_worker()
            line = worker.ask(constraint)
            if line:
                self._idle.put(worker)
                return line, 0
            self._workers.discard(worker)
            code = worker.end()
            if code != -signal.SIGKILL or self._is_closed:
                break
        return b"", code

    def _take_worker(self) -> "GrammarWorker":
        try:
            return self._idle.get_nowait()
        except Empty:
            worker = GrammarWorker()
            self._workers.add(worker)
            return worker


class GrammarWorker:
    """A process that compiles one constraint at a time."""

    def __init__(self) -> None:
        # asyncio's subprocesses fork, which is not safe with gRPC's threads.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tgis.router.grammar.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a crashing library's last output may quote the user
            start_new_session=True,  # a terminal's Ctrl-C is meant for the router alone
        )

    def ask(self, constraint: Constraint) -> bytes:
        """Return the worker's line; empty if the worker is killed or dies of the constraint."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        timer = threading.Timer(TIMEOUT_S, self._process.kill)
        timer.start()
        try:
            stdin.write(json.dumps([constraint.kind, constraint.text]).encode() + b"\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = b""
        finally:
            timer.cancel()
        return line if line.endswith(b"\n") else b""

    def end(self) -> int:
        """Wait for the worker and return its exit status: its own one, if it was already ending."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # the worker has not read everything
                self._process.stdin.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return self._process.wait()

    def kill(self) -> None:
        self._process.kill()


def _read_answer(line: bytes, field: str) -> Grammar | str:
    answer = json.loads(line)
    if "error" in answer:
        return f"is not valid: {answer['error']}"
    text = answer["grammar"]
    return Grammar(text, hashlib.sha256(text.encode()).hexdigest(), field)
