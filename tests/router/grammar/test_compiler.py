"""Check the grammars compiled from constraints: refusals, accepted texts, and isolation from hostile
inputs."""

import asyncio
import json
import os
import random
import re
import signal
import time
from collections.abc import AsyncIterator, Hashable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from tests.support.router.grammars import DEEP_RULES, SLOW
from tests.support.seeds import seed_ranges
from tests.support.tokenizers.trained import write_byte_level
from tests.support.worker_processes import children
from tgis.pb import generation_pb2 as pb
from tgis.process.worker_pool import Reply
from tgis.router.api.fmaas.messages import read_guided
from tgis.router.errors import RequestError, UnavailableError
from tgis.router.grammar import compiler
from tgis.router.grammar.compiler import (
    CACHE_SIZE,
    MAX_CHOICES,
    WORKER,
    Constraint,
    GrammarCompiler,
    read_constraint,
)
from tgis.router.grammar.worker import ByteVocabulary

Decoding = pb.DecodingParameters
MAX_BYTES = 1 << 16
BYTES = LLTokenizer(TokenizerWrapper(ByteVocabulary()))
HUGE = "\N{PILE OF POO}" * (MAX_BYTES // 4)  # in bytes, not in characters


def choice(*choices: str) -> pb.DecodingParameters:
    return Decoding(choice=Decoding.StringChoices(choices=choices))


@pytest_asyncio.fixture
async def grammars() -> AsyncIterator[GrammarCompiler]:
    grammars = GrammarCompiler()
    yield grammars
    grammars.close()


async def compile_text(grammars: GrammarCompiler, decoding: pb.DecodingParameters) -> str:
    constraint = read_constraint(read_guided(decoding), MAX_BYTES)
    assert constraint is not None
    return (await grammars.compile(constraint)).text


def matches(grammar: str, text: str) -> bool:
    """Return whether the grammar accepts the whole text, byte by byte."""
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


@pytest.mark.parametrize(
    "decoding", [Decoding(), Decoding(format=Decoding.TEXT), Decoding(repetition_penalty=2)]
)
def test_free_text_has_no_constraint(decoding: pb.DecodingParameters) -> None:
    guided = read_guided(decoding)
    assert guided is None or read_constraint(guided, MAX_BYTES) is None


@pytest.mark.parametrize(
    ("decoding", "text"),
    [
        (choice(), "Must provide at least two choices"),
        (choice("one"), "Must provide at least two choices"),
        (choice(*map(str, range(MAX_CHOICES + 1))), "choice must have at most 4096 choices"),
        (choice(HUGE, "a"), "choice must have at most 65536 UTF8 bytes"),
        (Decoding(regex=HUGE + "a"), "regex must have at most 65536 UTF8 bytes"),
        (Decoding(json_schema=HUGE + "a"), "json_schema must have at most 65536 UTF8 bytes"),
        (Decoding(grammar=HUGE + "a"), "grammar must have at most 65536 UTF8 bytes"),
    ],
)
def test_errors_visible_before_compilation_are_refused_at_once(
    decoding: pb.DecodingParameters, text: str
) -> None:
    with pytest.raises(RequestError) as error:
        read_constraint(read_guided(decoding), MAX_BYTES)
    assert str(error.value) == text


REFUSED = [
    (Decoding(regex="(a"), "regex is not valid: unclosed group"),
    (Decoding(regex="a\\"), "regex is not valid: it ends with a lone backslash"),
    (Decoding(regex="[^\\s\\S]"), "regex is not valid: no text matches it"),
    (Decoding(regex="(" * 3000 + "a" + ")" * 3000), "regex is not valid: "),
    (Decoding(json_schema=""), "json_schema is not valid: Expecting value at line 1, column 1"),
    (Decoding(json_schema='{"type":'), "json_schema is not valid: Expecting value at line 1, column 9"),
    (Decoding(json_schema="5"), "json_schema is not valid: schema must be an object or boolean"),
    (Decoding(json_schema='{"const": 1e999}'), "json_schema is not valid: a number is out of range"),
    (Decoding(json_schema="9" * 5000), "json_schema is not valid: a number is out of range"),
    (Decoding(json_schema="[" * 9999), "json_schema is not valid: it is nested too deeply"),
    (Decoding(json_schema='{"$ref": "#"}'), "json_schema is not valid: no text matches it"),
    (Decoding(json_schema='{"$ref": "http://127.0.0.1:9/x"}'), "json_schema is not valid: Resource"),
    (Decoding(json_schema='{"$ref": "file:///etc/hosts"}'), "json_schema is not valid: Resource"),
    (Decoding(json_schema='{"type": "strange"}'), "json_schema is not valid: Invalid type: strange"),
    (Decoding(json_schema=json.dumps(SLOW)), "json_schema is too complex"),
    (Decoding(grammar=""), "grammar is not valid: No 'root' rule found"),
    (Decoding(grammar="root ::= x"), "grammar is not valid: Rule 'x' not found"),
    (Decoding(grammar="root ::= " + "(" * 9999), "grammar is not valid: it is nested too deeply"),
    (Decoding(grammar="start: x"), 'grammar is not valid: unknown name: "x"'),
    (Decoding(grammar="start: start"), "grammar is not valid: no text matches it"),
    (
        Decoding(grammar='start: "a" x\nx: x "b"'),
        "grammar is not valid: a text that it allows cannot be completed",
    ),
    (Decoding(grammar="start: <|tool|>"), 'grammar is not valid: unknown special token: "<|tool|>"'),
    (Decoding(grammar=DEEP_RULES), "grammar is too complex"),
]


async def test_grammars_that_do_not_compile_are_refused_in_one_short_line(grammars: GrammarCompiler) -> None:
    """Compile twice, the second time from the cache, and the slowest a few more times."""
    seconds = []
    for decoding, expected in [*REFUSED * 2, *REFUSED[-1:] * 4]:
        began = time.monotonic()
        with pytest.raises(RequestError) as error:
            await compile_text(grammars, decoding)
        seconds.append(time.monotonic() - began)
        text = str(error.value)
        assert text.startswith(expected)
        assert text.isprintable()
        assert len(text) < 260
    assert min(seconds[-5:]) < 0.01, "a busy machine may delay some"


async def test_the_grammar_after_a_refusal_is_served(grammars: GrammarCompiler) -> None:
    for decoding, _ in REFUSED:
        with pytest.raises(RequestError):
            await compile_text(grammars, decoding)
        assert matches(await compile_text(grammars, Decoding(regex=f"a|{random.random()}")), "a")


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"a/b", r"a\/b", r"/", "a\nb", r"\n", r'"', r"\\", r"^ab$", r"a|b/c", r"[/]+", "é+", r"[а-я]{2}"),
        *(r"(?i)ab", r"(?:x|yz){2,3}", r"[^a]", r".", "", "a#b", " a ", r"\x41", "\t", "🙂|🙃", r"\{a\}"),
        *("%", r"a*?b", r"\d+", r"\."),
    ],
)
@seed_ranges(12, 60)
async def test_a_regex_is_read_as_python_reads_it(
    grammars: GrammarCompiler, pattern: str, seeds: range
) -> None:
    grammar = await compile_text(grammars, Decoding(regex=pattern))
    alphabet = 'abcxyzAB/\\"\n\t .#%{}1é🙂🙃жя'
    texts = [
        "",
        *alphabet,
        "a/b",
        "a\nb",
        "ab",
        "AB",
        "b/c",
        "//",
        "éé",
        "жя",
        "12",
        "xyz",
        "yzx",
        "xx",
        "a#b",
        " a ",
        "{a}",
        "aab",
    ]
    drawn = map(random.Random, seeds)
    texts += ["".join(r.choices(alphabet, k=r.randint(2, 4))) for r in drawn]
    for text in texts:
        assert matches(grammar, text) == bool(re.fullmatch(pattern, text)), text


async def test_choices_are_taken_literally(grammars: GrammarCompiler) -> None:
    r = random.Random(1)
    alphabet = [
        "a",
        '"',
        "\\",
        "\n",
        "\0",
        "/",
        "|",
        "é",
        "🙂",
        "\u2028",
        "(",
        "*",
        "\x7f",
        "start:",
        "\ufeff",
    ]
    for _ in range(20):
        words = ["".join(r.choices(alphabet, k=r.randint(0, 3))) for _ in range(4)]
        grammar = await compile_text(grammars, choice(*words))
        for text in [*words, *("".join(r.choices(alphabet, k=r.randint(0, 3))) for _ in range(20))]:
            assert matches(grammar, text) == (text in words)


async def test_the_maximum_number_and_length_of_choices(grammars: GrammarCompiler) -> None:
    words = [f"{i * 7919 % MAX_CHOICES:08x}" for i in range(MAX_CHOICES)]
    grammar = await compile_text(grammars, choice(*words))
    assert matches(grammar, words[1234])
    assert not matches(grammar, "ffffffff")
    longest = await compile_text(grammars, choice("\1" * (MAX_BYTES - 1), "b"))
    assert matches(longest, "b")


VALUES: list[Any] = [
    {},
    {"a": 1},
    {"a": "x", "b": [1, None]},
    [],
    [1],
    1,
    -2.5,
    "s",
    True,
    None,
    {"b": {"c": [{}]}},
]


async def test_json_is_any_object(grammars: GrammarCompiler) -> None:
    grammar = await compile_text(grammars, Decoding(format=Decoding.JSON))
    for value in VALUES:
        for indent in (None, 2):
            assert matches(grammar, json.dumps(value, indent=indent)) == isinstance(value, dict)
    for text in ("", "{", "{}x", "{'a': 1}", '{"a": 01}', '{"a": NaN}', '{"a": "\n"}'):
        assert not matches(grammar, text)


def valid(value: Any) -> bool:
    """Check a value by the schema of the test below."""
    if not isinstance(value, dict) or set(value) - {"n", "t"} or "n" not in value:
        return False
    n, t = value["n"], value.get("t", [])
    is_integer = isinstance(n, int) and not isinstance(n, bool)
    return is_integer and 0 <= n <= 12 and isinstance(t, list) and len(t) <= 2 and set(t) <= {"x", "y/z"}


async def test_a_schema_is_obeyed(grammars: GrammarCompiler) -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "n": {"$ref": "#/$defs/n"},
            "t": {"type": "array", "items": {"enum": ["x", "y/z"]}, "maxItems": 2},
        },
        "required": ["n"],
        "additionalProperties": False,
        "$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 12}},
    }
    grammar = await compile_text(grammars, Decoding(json_schema=json.dumps(schema, indent=4)))
    r = random.Random(2)
    num_valid = 0
    for _ in range(300):
        value = {
            "n": r.choice([0, 7, 12, 13, -1, True, "1"]),
            "t": r.choices(["x", "y/z", "z"], k=r.randint(0, 3)),
        }
        for key in ("n", "t"):
            if r.random() < 0.2:
                del value[key]
        if r.random() < 0.1:
            value["extra"] = 1
        num_valid += valid(value)
        assert matches(grammar, json.dumps(value)) == valid(value)
    assert num_valid > 20


@pytest.mark.parametrize("decoding", [Decoding(format=Decoding.JSON), Decoding(json_schema="true")])
async def test_json_may_be_indented_but_not_blank_for_ever(
    grammars: GrammarCompiler, decoding: pb.DecodingParameters
) -> None:
    grammar = await compile_text(grammars, decoding)
    value = {"a": [1, {"b": None}], "c": "d\n"}
    for indent in (None, 2, 4, 8, "\t"):
        assert matches(grammar, json.dumps(value, indent=indent))
    assert matches(grammar, json.dumps(value, separators=(",", ":")))
    assert matches(grammar, json.dumps(value, indent=2).replace("\n", "\r\n"))
    for blank in ("\n\n", " " * 50, "\n" + " " * 60):
        assert not matches(grammar, f'{{{blank}"a": 1}}')


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" word+\nword: " " WORD\nWORD: /[a-c]+/',
        'root ::= "a" word+\nword ::= " " [a-c]+  # comment',
    ],
)
async def test_grammars_in_either_notation(grammars: GrammarCompiler, grammar: str) -> None:
    text = await compile_text(grammars, Decoding(grammar=grammar))
    assert [matches(text, one) for one in ("a b", "a abc cc", "a", "a d", "b a")] == [
        True,
        True,
        False,
        False,
        False,
    ]


async def test_a_forced_text_may_be_cut_into_tokens_in_any_way(
    grammars: GrammarCompiler, tmp_path: Path
) -> None:
    vocabulary = write_byte_level(tmp_path)
    tokenizer = LLTokenizer(vocabulary.to_str(), eos_token=[1])
    t, h, he = (vocabulary.token_to_id(piece) for piece in ("t", "h", "he"))
    decodings = [Decoding(regex="the"), choice("the", "the"), Decoding(grammar='start: "the"')]
    decodings += [Decoding(grammar='root ::= "the"'), Decoding(grammar='%llguidance {}\nstart: "the"')]
    decodings += [Decoding(json_schema='{"const": "the"}')]
    for decoding in decodings:
        matcher = LLMatcher(tokenizer, await compile_text(grammars, decoding), log_level=0)
        before = [vocabulary.token_to_id('"')] if decoding.json_schema else []
        assert matcher.consume_tokens([*before, t])
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        assert [i for i in range(400) if mask >> i & 1] == sorted([h, he])


async def test_one_constraint_is_compiled_once(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check concurrent requests for one grammar, also for a slow one whose first requester has left."""
    constraint = Constraint("json_schema", "json_schema", json.dumps(SLOW))
    asked = []
    ask = grammars._pool.ask

    async def count(question: list[Any], owner: Hashable) -> Reply:
        asked.append(question[1])
        return await ask(question, owner)

    monkeypatch.setattr(grammars._pool, "ask", count)
    tasks = [asyncio.create_task(grammars.compile(constraint)) for _ in range(20)]
    await asyncio.sleep(0.05)
    tasks[0].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert {str(result) for result in results[1:]} == {"json_schema is too complex"}
    assert asked == [constraint.text]
    one, other = await asyncio.gather(
        *(grammars.compile(Constraint("regex", "regex", "ab?")) for _ in range(2))
    )
    assert one is other
    assert await grammars.compile(Constraint("regex", "regex", "ab?")) is one


async def test_the_memory_of_answers_is_bounded(grammars: GrammarCompiler) -> None:
    first = await grammars.compile(Constraint("regex", "regex", "first"))
    for i in range(CACHE_SIZE + 5):
        await grammars.compile(Constraint("regex", "regex", f"a{i}"))
        assert await grammars.compile(Constraint("regex", "regex", "first")) is first, "the newest use counts"
    for i in range(CACHE_SIZE):
        await grammars.compile(Constraint("regex", "regex", f"b{i}"))
    again = await grammars.compile(Constraint("regex", "regex", "first"))
    assert again == first
    assert again is not first


async def test_the_loop_goes_on_while_hostile_texts_are_compiled(grammars: GrammarCompiler) -> None:
    hostile = [Decoding(json_schema=json.dumps({**SLOW, "maximum": 10**17 + i})) for i in range(4)]
    hostile += [Decoding(grammar=DEEP_RULES + f" // {i}") for i in range(4)]
    tasks = [asyncio.create_task(compile_text(grammars, decoding)) for decoding in hostile]
    gaps = []
    cpu_times = []
    while not all(task.done() for task in tasks):
        began = time.monotonic()
        cpu_began = time.thread_time()
        await asyncio.sleep(0.001)
        gaps.append(time.monotonic() - began)
        cpu_times.append(time.thread_time() - cpu_began)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, RequestError) for result in results)
    assert sorted(gaps)[len(gaps) // 2] < 0.05
    assert max(cpu_times) < 0.5
    assert sum(gap > 0.5 for gap in gaps) < len(hostile), "a busy machine may delay some turns"


async def test_a_killed_process_is_replaced_and_none_is_left_behind() -> None:
    grammars = GrammarCompiler()
    assert list(children(WORKER)) == [], "none before it is needed"
    await compile_text(grammars, Decoding(regex="a"))
    [child] = children(WORKER)
    os.kill(child, signal.SIGKILL)
    assert matches(await compile_text(grammars, Decoding(regex="c")), "c")
    [other] = children(WORKER)
    assert other != child
    grammars.close()
    assert list(children(WORKER)) == []


async def compile_at_last(grammars: GrammarCompiler, decoding: pb.DecodingParameters) -> str:
    """Try again while the machine is too busy."""
    for _ in range(20):
        try:
            return await compile_text(grammars, decoding)
        except UnavailableError:
            continue
    raise AssertionError("it is always busy")


async def test_a_worker_without_cpu_time_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is neither refused nor remembered: it is served when the machine has time again."""
    monkeypatch.setattr(compiler, "TIMEOUT_S", 2.0)
    with closing(GrammarCompiler()) as grammars:
        await compile_at_last(grammars, Decoding(regex="a"))
        [child] = children(WORKER)
        os.kill(child, signal.SIGSTOP)
        waiting = [asyncio.create_task(compile_text(grammars, Decoding(regex="b"))) for _ in range(2)]
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(error, UnavailableError)
            assert str(error).startswith("regex was not compiled in time, because")
        assert matches(await compile_at_last(grammars, Decoding(regex="b")), "b")
        assert child not in children(WORKER)
