"""Compiles grammars in a process of its own, with one line of JSON in and one out. Its time, memory and stack
are limited, because grammars may be hostile; being killed or crashing is an answer too."""

import json
import os
import random
import re
import resource
import signal
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

CPU_LIMIT_S = 0.1  # a schema of 300 properties takes 20 ms
TRIAL_BYTES = 64
MEMORY_BYTES = 1 << 30
# A shard compiles with a stack sixteen times as deep, so what fits here fits there.
STACK_BYTES = 4 << 20
MAX_CAUSE = 200
# White space as people indent. Without a limit, a model that does not know what comes next would write it for
# ever.
WHITESPACE = r"\r?\n[ \t]{0,40}|[ \t]{1,8}"
# Text that the grammar forces may still be split into tokens in any way.
HEADER = '%llguidance {"no_forcing": true}\n'
# These limits are tighter than a shard's.
LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000,
    step_lexer_fuel=100_000,
    step_max_items=30_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


class InvalidGrammarError(Exception):
    """Fault of a grammar. The text is one line that says what is wrong."""


class ByteVocabulary:
    """Smallest vocabulary that spells every text: all bytes and an end token."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (eos_token_id,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(10)
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(target=_answer_all, args=(sys.stdin.buffer, sys.stdout.buffer))
    worker.start()
    worker.join()


def compile_grammar(kind: str, text: str, tokenizer: LLTokenizer) -> str:
    """Return `text` in the one form that shards read. Raises InvalidGrammarError if it cannot be compiled,
    if no text matches it, and if following it costs too much."""
    try:
        grammar = _CONVERT[kind](text)
    except RecursionError as error:
        raise InvalidGrammarError("it is nested too deeply") from error
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise InvalidGrammarError(_cause(matcher.get_error()))
    _follow(matcher)
    return grammar


def _follow(matcher: LLMatcher) -> None:
    """Follow the grammar along the start of a fixed random match of it. Raises InvalidGrammarError."""
    r = random.Random(0)
    for count in range(TRIAL_BYTES):
        is_accepting = matcher.is_accepting()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error() or matcher.is_stopped():
            if not matcher.get_error() or is_accepting:
                return
            if not matcher.get_error().startswith("NoExtension"):
                raise InvalidGrammarError("it is too complex")
            raise InvalidGrammarError(
                "a text that it allows cannot be completed" if count else "no text matches it"
            )
        allowed = [byte for byte in range(256) if mask >> byte & 1]
        if not allowed:
            return
        matcher.consume_token(r.choice(allowed))


def _answer_all(requests: BinaryIO, answers: BinaryIO) -> None:
    tokenizer = LLTokenizer(TokenizerWrapper(ByteVocabulary()))
    for line in requests:
        # The default action of its signal ends the process, whatever code is running.
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
        kind, text = json.loads(line)
        try:
            answer = {"grammar": compile_grammar(kind, text, tokenizer)}
        except InvalidGrammarError as error:
            answer = {"error": str(error)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _from_json_schema(text: str) -> str:
    """Return the grammar of a JSON schema, with `WHITESPACE` unless the schema defines its own."""
    try:
        schema = json.loads(text)
        if schema is True:
            schema = {}
        if isinstance(schema, dict):
            schema.setdefault("x-guidance", {"whitespace_pattern": WHITESPACE})
        schema = json.dumps(schema, allow_nan=False)
    except json.JSONDecodeError as error:
        raise InvalidGrammarError(f"{error.msg} at line {error.lineno}, column {error.colno}") from error
    except ValueError as error:
        raise InvalidGrammarError("a number is out of range") from error
    return f"{HEADER}start: %json {schema}"


def _from_regex(text: str) -> str:
    if (len(text) - len(text.rstrip("\\"))) % 2:
        raise InvalidGrammarError("it ends with a lone backslash")
    return f"{HEADER}start: /{regex_to_lark(text)}/"


def _from_choices(text: str) -> str:
    choices = " | ".join(json.dumps(choice) for choice in dict.fromkeys(json.loads(text)))
    return f"{HEADER}start: CHOICE\nCHOICE: {choices}"


def _from_grammar(text: str) -> str:
    """Return the grammar of a Lark or GBNF text. The header comes last, to keep line numbers in errors."""
    try:
        return f"{any_to_lark(text)}\n{HEADER}"
    except RecursionError:
        raise
    except Exception as error:  # the converter raises its own class and bare Exception alike
        raise InvalidGrammarError(_cause(str(error))) from error


_CONVERT: dict[str, Callable[[str], str]] = {
    "json_schema": _from_json_schema,
    "regex": _from_regex,
    "choice": _from_choices,
    "grammar": _from_grammar,
}
_PLACE = re.compile(
    r"^(error: |at \d+\(\d+\): |failed to compile JSON schema: |failed to parse \"%json\": )+"
)


def _cause(message: str) -> str:
    """Return the most telling line of the library's message, without the place in a text that the user has
    not written, and without the list of special tokens that follows it."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["unknown cause"]
    line = next((line for line in lines if line.startswith("error: ")), lines[0])
    line = _PLACE.sub("", line)
    line = line.split("; following special tokens")[0]
    return line if len(line) <= MAX_CAUSE else line[: MAX_CAUSE - 1] + "…"


if __name__ == "__main__":
    main()
