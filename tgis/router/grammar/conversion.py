"""Converts all constraints to the notation of the grammar library."""

import json
import re
from collections.abc import Callable

from llguidance import regex_to_lark

from tgis.router.grammar.errors import TOO_DEEP, InvalidGrammarError
from tgis.router.grammar.gbnf import gbnf_to_lark, is_gbnf
from tgis.router.grammar.json_schema.reading import read_schema

MAX_CAUSE = 200
# In regexes, `\d` and `\D` refer to ASCII digits; `\w` and `\s` to Unicode words and spaces. In patterns of
# JSON schemas, `\w` also refers to ASCII, as in ECMA 262.
ASCII = "d"
# Strings, comments and regexes of a Lark text.
_LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"|(?://|\#)[^\n]*|/(?P<regex>(?:[^/\\\n]|\\.)+)/')
# The library must not force tokens, so that the model may split forced text into tokens in any way.
HEADER = '%llguidance {"no_forcing": true}\n'


def convert(kind: str, text: str) -> str:
    """Convert a constraint to a grammar. Raises InvalidGrammarError."""
    try:
        return _CONVERT[kind](text)
    except RecursionError as error:
        raise InvalidGrammarError(TOO_DEEP) from error


def cause_of(message: str) -> str:
    """Return the most informative line of the library's message. Omit positions, which refer to a text that
    the user has not written, and the list of special tokens after it."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["unknown cause"]
    line = next((line for line in lines if line.startswith("error: ")), lines[0])
    line = _PLACE.sub("", line)
    line = line.split("; following special tokens")[0]
    return line if len(line) <= MAX_CAUSE else line[: MAX_CAUSE - 1] + "…"


def _from_json_schema(text: str) -> str:
    return f"{HEADER}start: %json {read_schema(text)}"


def _from_regex(text: str) -> str:
    if (len(text) - len(text.rstrip("\\"))) % 2:
        raise InvalidGrammarError("it ends with a lone backslash")
    return f"{HEADER}start: /{regex_to_lark(text, use_ascii=ASCII)}/"


def _from_choices(text: str) -> str:
    choices = " | ".join(json.dumps(choice) for choice in dict.fromkeys(json.loads(text)))
    return f"{HEADER}start: CHOICE\nCHOICE: {choices}"


def _from_grammar(text: str) -> str:
    """Return the grammar of a Lark or GBNF text. The header comes last, so that line numbers in errors are
    right."""
    lark = gbnf_to_lark(text) if is_gbnf(text) else _LITERAL.sub(_with_ascii_digits, text)
    return f"{lark}\n{HEADER}"


def _with_ascii_digits(match: re.Match[str]) -> str:
    """Return a literal of a Lark text, with `\\d` in regexes limited to ASCII digits."""
    regex = match["regex"]
    return match[0] if regex is None else f"/{regex_to_lark(regex, use_ascii=ASCII)}/"


_CONVERT: dict[str, Callable[[str], str]] = {
    "json_schema": _from_json_schema,
    "regex": _from_regex,
    "choice": _from_choices,
    "grammar": _from_grammar,
}
_PLACE = re.compile(
    r"^(error: |at \d+\(\d+\): |failed to compile JSON schema: |failed to parse \"%json\": )+"
)
