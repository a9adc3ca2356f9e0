"""Compiles grammars in a separate process, with one JSON value per request and per answer. Its time, memory
and stack are limited, because grammars may be hostile. The router treats a killed or crashed worker as an
answer."""

import json
import os
import random
import resource
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from tgis.process.worker import answer_requests
from tgis.router.grammar.answer_grammar import write_answer_grammar
from tgis.router.grammar.answer_rules import FREE, AnswerRules, CallRule, CallRules
from tgis.router.grammar.conversion import HEADER, cause_of, convert
from tgis.router.grammar.errors import InvalidGrammarError
from tgis.router.grammar.json_schema.reading import has_unknown_formats, read_schema
from tgis.router.grammar.parameters import read_parameters

CPU_LIMIT_S = 0.1  # a schema of 300 properties takes 20 ms
CPU_LIMIT_FOR_FUNCTION_S = 0.002  # requests have at most 128 functions
TRIAL_BYTES = 64
MAX_MARKS = 16
FIRST_MARK = 257
ANY_OBJECT = '{"type": "object"}'
MEMORY_BYTES = 1 << 30
# A shard's stack is 16 times as large, so a grammar that compiles here also compiles there.
STACK_BYTES = 4 << 20
# These limits are lower than a shard's.
LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000,
    step_lexer_fuel=100_000,
    step_max_items=30_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


class ByteVocabulary:
    """Smallest vocabulary that can express every text: all bytes, an end token, and tokens for marks."""

    eos_token_id = 256
    bos_token_id = None

    def __init__(self, num_marks: int = 0) -> None:
        marks = (f"<mark {number}>".encode() for number in range(num_marks))
        self.tokens = (*(bytes([byte]) for byte in range(256)), b"<end>", *marks)
        self.special_token_ids = tuple(range(256, len(self.tokens)))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(10)
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(target=answer_requests, args=(partial(_answer, Compiler()),))
    worker.start()
    worker.join()


class Compiler:
    """Compiler of grammars with a vocabulary of bytes."""

    def __init__(self) -> None:
        self._bytes = LLTokenizer(TokenizerWrapper(ByteVocabulary()))
        self._bytes_and_marks = LLTokenizer(TokenizerWrapper(ByteVocabulary(MAX_MARKS)))

    def compile(self, kind: str, text: str, rules: AnswerRules | None) -> str:
        """Return the grammar of a constraint, or of a whole answer if there are rules, in the notation of the
        shards. Raises InvalidGrammarError if the grammar does not compile, matches no text, or is too
        expensive."""
        if rules is None:
            return self._compile_text(kind, text)
        grammar = None if kind == FREE else self._compile_text(kind, text)
        try:
            return self._compile_answer(rules, grammar)
        except InvalidGrammarError:
            loosened = self._loosen(rules)
            if loosened == rules:
                raise
            return self._compile_answer(loosened, grammar)

    def _compile_text(self, kind: str, text: str) -> str:
        grammar = convert(kind, text)
        _try(grammar, self._bytes)
        return grammar

    def _compile_answer(self, rules: AnswerRules, text_grammar: str | None) -> str:
        ids: dict[int, int] = {}
        trial = write_answer_grammar(
            rules, text_grammar, lambda token_id: ids.setdefault(token_id, FIRST_MARK + len(ids))
        )
        assert len(ids) <= MAX_MARKS, "formats have few marks"
        _try(trial, self._bytes_and_marks)
        return write_answer_grammar(rules, text_grammar, lambda token_id: token_id)

    def _loosen(self, rules: AnswerRules) -> AnswerRules:
        """Replace unsupported schemas that are not strict by one that allows any object. Raises
        InvalidGrammarError with the field of the first unsupported strict schema."""
        if rules.calls is None:
            return rules
        functions = tuple(self._keep_or_loosen(function, rules.calls) for function in rules.calls.functions)
        return replace(rules, calls=replace(rules.calls, functions=functions))

    def _keep_or_loosen(self, function: CallRule, calls: CallRules) -> CallRule:
        try:
            write_answer_grammar(
                AnswerRules(calls=replace(calls, functions=(function,))), None, lambda token_id: token_id
            )
            for schema in _list_values(function):
                _try(f"{HEADER}start: %json {read_schema(schema, function.is_strict)}", self._bytes)
        except InvalidGrammarError as error:
            if function.is_strict:
                raise InvalidGrammarError(str(error), function.field, quotes=error.quotes) from error
            return function._replace(schema=ANY_OBJECT)
        return function


def _try(grammar: str, tokenizer: LLTokenizer) -> None:
    """Compile a grammar, and advance it along the beginning of a fixed random match. Raises
    InvalidGrammarError."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise InvalidGrammarError(cause_of(matcher.get_error()), quotes=True)
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
        allowed = [i for i in range(tokenizer.vocab_size) if mask >> i & 1 and i != tokenizer.eos_token]
        if not allowed:
            return
        matcher.consume_token(r.choice(allowed))


def _list_values(function: CallRule) -> list[str]:
    """Return the schemas of the JSON values that a call has."""
    if function.tags is None and function.notation is None:
        return [function.schema]
    is_json = function.notation is not None
    return [each.schema for each in read_parameters(function.schema) if is_json or not each.is_text]


def _list_schemas(kind: str, text: str, rules: AnswerRules | None) -> Iterator[str]:
    if kind == "json_schema":
        yield text
    for function in rules.calls.functions if rules and rules.calls else ():
        yield function.schema


def _cpu_limit_s(rules: AnswerRules | None) -> float:
    if rules is None:
        return CPU_LIMIT_S
    # The text's constraint is compiled twice: alone, and as part of the answer's grammar.
    num_functions = len(rules.calls.functions) if rules.calls else 0
    return 2 * CPU_LIMIT_S + num_functions * CPU_LIMIT_FOR_FUNCTION_S


def _answer(compiler: Compiler, request: bytes) -> bytes:
    kind, text, plain_rules = json.loads(request)
    rules = msgspec.convert(plain_rules, AnswerRules | None)
    # The signal's default action ends the process, even during library code.
    signal.setitimer(signal.ITIMER_PROF, _cpu_limit_s(rules))
    try:
        answer = {
            "grammar": compiler.compile(kind, text, rules),
            "has_unknown_formats": any(map(has_unknown_formats, _list_schemas(kind, text, rules))),
        }
    except InvalidGrammarError as error:
        answer = {"error": str(error), "field": error.field, "quotes": error.quotes}
    signal.setitimer(signal.ITIMER_PROF, 0)
    return json.dumps(answer).encode()


if __name__ == "__main__":
    main()
