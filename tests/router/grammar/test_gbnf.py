r"""GBNF as llama.cpp means it, random grammars against Python's `re`, what is refused, and what is Lark."""

import json
import random
import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from tgis.router.grammar.conversion import convert
from tgis.router.grammar.errors import InvalidGrammarError
from tgis.router.grammar.worker import ByteVocabulary, Compiler

BYTES = LLTokenizer(TokenizerWrapper(ByteVocabulary()))
ALPHABET = "ab-]"


def takes(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, convert("grammar", grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    if matcher.validate_tokens(data) < len(data):
        return False
    matcher.consume_tokens(data)
    return bool(matcher.is_accepting())


JSON_GRAMMAR = r"""
# JSON, as llama.cpp's own grammar of it has it
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::= "[" ws ( value ("," ws value)* )? "]" ws

string ::= "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, in this grammar it is after a token
ws ::= | " " | "\n" [ \t]{0,20}
"""
ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
CHESS = r"""
root ::= (
    "1. " move " " move "\n"
    ([1-9] [0-9]? ". " move " " move "\n")+
)
move ::= (pawn | nonpawn | castle) [+#]?
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle ::= "O-O" "-O"?
"""
NAMES = "fooBar foo-bar foo_bar start 1a UP"
CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "a rule without its own end": ('root ::= [a-z]+ "b"', ["ab", "bbb"], ["b", "a", "aba"]),
    "a rule that another one continues": ('root ::= word "b"\nword ::= [a-z]+', ["ab", "abab"], ["b"]),
    "tokens that are parts of others": ('root ::= w w\nw ::= "a" | "aa"', ["aa", "aaa", "aaaa"], ["a"]),
    "hexadecimal escapes": (r'root ::= "\x41\u00e9\U0001F600"', ["Aé😀"], ["A"]),
    "escapes of a class": (r"root ::= [\x41-\x43\u00e9\n\]\\-]+", ["ABCé\n]\\-"], ["D", "["]),
    "other escapes": (r'root ::= "\t\r\n\\\"\[\]"', ['\t\r\n\\"[]'], ["t"]),
    "any character": ("root ::= .", ["\n", "x", "😀", "\0"], ["", "xx"]),
    "negation": (r"root ::= [^a-c\n]", ["d", "é", "\0"], ["a", "b", "\n"]),
    "an empty negation": ("root ::= [^]", ["a", "\n"], [""]),
    "operators of regexes": ("root ::= [&&~~|.$*+?(){}/#'\"]+", ["&~|.$*+?(){}/#'\""], ["a", "^"]),
    "a caret that is not the first": ("root ::= [a^]+", ["^a"], ["b"]),
    "an escaped caret": (r"root ::= [\x5e]", ["^"], ["a"]),
    "a range to and from a dash": ("root ::= [+--]+", ["+,-"], ["."]),
    "a dash at the end": ("root ::= [a-c-]+", ["a-c"], ["d"]),
    "repetitions": ('root ::= "a"{2} "b"{1,} "c"{0,2} "d"?', ["aab", "aabbccd"], ["ab", "aa", "aabccc"]),
    "repetitions of repetitions": ('root ::= ("a"{2})* "b"+?', ["", "aaaab", "bb"], ["a"]),
    "an empty alternative": ('root ::= "x" ( | "y") | ', ["x", "xy", ""], ["y"]),
    "an empty literal": ('root ::= "" "a" ""*', ["a"], [""]),
    "lines after a bar": ('root ::= "a" |\n\n  "b" | # a comment\n "c"', ["a", "b", "c"], [""]),
    "comments": ('# one\nroot ::= "a" # two "x\n# three\n', ["a"], ["x"]),
    "carriage returns": ('root ::= x\r\nx ::= "a"\r\n', ["a"], []),
    "names": (
        f"root ::= {NAMES}\n"
        + "\n".join(
            f'{name} ::= "{i}"' for i, name in enumerate("fooBar foo-bar foo_bar start 1a UP".split())
        ),
        ["012345"],
        ["01234"],
    ),
    "left recursion": ('root ::= root "a" | "a"', ["a", "aaa"], [""]),
    "other characters than ASCII": ('root ::= [ぁ-ゟ]+ "é"', ["ひらé"], ["é", "カé"]),
    "control characters": ('root ::= "\x01" [\x02-\x03]', ["\x01\x02"], ["\x01\x04"]),
    "arithmetic": (ARITHMETIC, ["x = 1\n", "(a+b)*2 =c\n"], ["x = \n", "1=2"]),
    "chess": (CHESS, ["1. e4 e5\n2. Nf3 Nc6\n", "1. e4 e5\n12. O-O-O exd5+\n"], ["1. e4 e5\n", "e4"]),
}


@pytest.mark.parametrize("case", CASES)
def test_texts_of_grammars(case: str) -> None:
    grammar, right, wrong = CASES[case]
    assert [text for text in right if not takes(grammar, text)] == []
    assert [text for text in wrong if takes(grammar, text)] == []
    Compiler().compile("grammar", grammar, None)


def test_the_json_grammar_accepts_json() -> None:
    values = [{}, {"a": [1, -2.5, 1e5, "é\n", True, None, {"b": {}}]}, {"": []}]
    for value in values:
        assert takes(JSON_GRAMMAR, json.dumps(value, ensure_ascii=False))
        assert takes(JSON_GRAMMAR, json.dumps(value, separators=(",", ":")))
    for text in ("[]", '{"a": }', '{"a": 01}', '{"a": "\x01"}', "{'a': 1}", '{"a": 1} x'):
        assert not takes(JSON_GRAMMAR, text)
    Compiler().compile("grammar", JSON_GRAMMAR, None)


REFUSED = {
    "": "No 'root' rule found",
    'x ::= "a"': "No 'root' rule found",
    "root ::= x": "Rule 'x' not found",
    'root ::= "a': "expected the end of a literal or of [ at line 1, column 12",
    "root ::= [a": "expected the end of a literal or of [ at line 1, column 12",
    'root ::= ("a"': "expected ) at line 1, column 14",
    'root ::= "a")': "expected the end of the line at line 1, column 13",
    'root ::= "a"{': "expected {m}, {m,} or {m,n} at line 1, column 13",
    'root ::= "a"{,3}': "expected {m}, {m,} or {m,n} at line 1, column 13",
    'root ::= "a"{99999}': "expected at most 2000 repetitions at line 1, column 13",
    r'root ::= "\d"': r"expected one of \t \r \n \\ \" \[ \] \xXX \uXXXX \UXXXXXXXX at line 1, column 11",
    r'root ::= "\x4"': r"expected one of",
    r'root ::= "\uD800"': "expected the code of a character",
    r'root ::= "\U00110000"': "expected the code of a character",
    "root ::= [z-a]": "expected a range that begins with its smaller character",
    "root ::= []": "expected a character between [ and ]",
    'root ::= "a"\nroot ::= "b"': "expected another name, because this rule exists already",
    'root ::= "a"\n| "b"': "expected the name of a rule at line 2, column 1",
    'root ::= <think> "a"': "expected the end of the line at line 1, column 10",
    "root ::= " + "(" * 9999: "it is nested too deeply",
}


@pytest.mark.parametrize("grammar", REFUSED, ids=lambda grammar: grammar[:30])
def test_refusals_say_where(grammar: str) -> None:
    with pytest.raises(InvalidGrammarError) as raised:
        convert("grammar", grammar)
    assert str(raised.value).startswith(REFUSED[grammar])


def quoted(text: str) -> str:
    return '"' + "".join(f"\\{char}" if char in '"\\[]' else char for char in text) + '"'


literals = st.text(ALPHABET, max_size=3).map(lambda text: (quoted(text), re.escape(text)))
classes = st.sampled_from([("[a-b]", "[ab]"), ("[^a]", "[^a]"), (r"[\]-]", r"[\]\-]"), (".", r"(?s:.)")])
Pair = tuple[str, str]


def extend(inner: st.SearchStrategy[Pair]) -> st.SearchStrategy[Pair]:
    repeats = st.sampled_from(["*", "+", "?", "{2}", "{1,}", "{0,2}"])
    several = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        st.tuples(inner, repeats).map(lambda x: (f"({x[0][0]}){x[1]}", f"(?:{x[0][1]}){x[1]}")),
        several.map(lambda x: (" ".join(g for g, _ in x), "".join(f"(?:{p})" for _, p in x))),
        several.map(lambda x: (f"({' | '.join(g for g, _ in x)})", "|".join(f"(?:{p})" for _, p in x))),
    )


@pytest.mark.parametrize("num_examples", [40, pytest.param(150, marks=pytest.mark.slow)])
def test_random_grammars_equal_regexes(num_examples: int) -> None:
    @settings(max_examples=num_examples, deadline=None)
    @given(st.recursive(literals | classes, extend, max_leaves=6), st.randoms(use_true_random=False))
    def check(pair: Pair, r: random.Random) -> None:
        body, pattern = pair
        grammar = f"root ::= part\npart ::= {body}"
        for _ in range(12):
            text = "".join(r.choice(ALPHABET) for _ in range(r.randrange(6)))
            assert takes(grammar, text) == bool(re.fullmatch(pattern, text)), text

    check()


LARK = {
    "?start: a+\na: /x/": "xx",
    '!start: "x"': "x",
    '  ?start: "x"\n': "x",
    "%import common.INT\nstart: INT": "12",
    '// root ::= "y"\nstart: "x"': "x",
    'a: "x"\nstart: a': "x",
    "start: A\nA: /\\//": "/",
    'start: "a//b" /\\d+/ "/\\\\d/"': "a//b12/\\d/",
    'start: %json {"type": "string", "pattern": "^//$"}': '"//"',
}


@pytest.mark.parametrize("grammar", LARK)
def test_lark_is_not_taken_for_gbnf(grammar: str) -> None:
    assert takes(grammar, LARK[grammar])


def test_lark_that_the_library_does_not_read_is_refused_with_the_reason() -> None:
    with pytest.raises(InvalidGrammarError, match="priority not supported yet"):
        Compiler().compile("grammar", 'start.2: "x"', None)


@pytest.mark.parametrize(
    ("kind", "write"),
    [
        ("regex", lambda regex: regex),
        ("grammar", lambda regex: f"start: /{regex}/"),
        ("grammar", lambda regex: f"?start: A\nA: /{regex}/i // /\\d/"),
        ("json_schema", lambda regex: json.dumps({"type": "string", "pattern": f"^(?:{regex})$"})),
    ],
    ids=["regex", "Lark", "Lark's terminals", "pattern"],
)
def test_digits_are_those_of_ascii(kind: str, write: Callable[[str], str]) -> None:
    """Check `\\d`, whose digits have changed between releases of the library."""
    quote = '"' if kind == "json_schema" else ""
    for regex, allowed in ((r"\d", "5"), (r"[\dx]", "5x"), (r"\D", "x٤५５"), (r"[^\d]", "x٤५５")):
        matcher = LLMatcher(BYTES, convert(kind, write(regex)), log_level=0)
        result = ""
        for char in "5x٤५５":
            data = list(f"{quote}{char}{quote}".encode())
            result += char if matcher.validate_tokens(data) == len(data) else ""
        assert sorted(result) == sorted(allowed), regex


def test_words_and_spaces_of_regexes_are_unicodes() -> None:
    for regex, char in ((r"\w", "é"), (r"\s", "\u2003")):
        matcher = LLMatcher(BYTES, convert("regex", regex), log_level=0)
        assert matcher.validate_tokens(list(char.encode())) == len(char.encode())
