"""Generates `docs/troubleshooting.md`: messages with explanations from troubleshooting.toml, then messages
that explain themselves. An explained message that is not in the source is an error."""

import re
import tomllib
from pathlib import Path

from scripts.messages import Message, collect, key_of
from tgis.router.api.grpc.interceptors.error_interceptor import STATUS

EXPLAINED = Path(__file__).parent / "troubleshooting.toml"
# Modules whose messages neither operators nor clients see.
INNER = ("tgis/net/framing.py",)

INTRODUCTION = """\
# Troubleshooting

This page lists the messages of the service in their exact words, and explains what they mean and what to do about them.
Braces stand for values. If the start or a command fails, one line, `error: …`, is printed to stderr and written to the
termination log; the exit status is 1, or 2 for an invalid option. With `--json-output` that line is the message of a
JSON object. Every other line is in the log. For a report, `tgis env` prints the versions, the machine and the settings.
[Observability](observability.md#alerts) explains the alerts.
"""
STATUSES = """\
## Statuses

| status | meaning and remedy |
|---|---|
"""
OTHERS = """\
## Further messages

These messages explain themselves.
"""
GROUPS = (
    (
        "At the start and from commands",
        "raised",
        ("tgis/router/", "tgis/prompts/", "tgis/sampling_parameters.py"),
    ),
    ("About requests, soft prompts and adapters", "raised", ()),
    ("In the log", "logged", ()),
)


def render() -> str:
    messages = [one for one in collect() if one.module not in INNER]
    explained = tomllib.loads(EXPLAINED.read_text())
    listed: set[str] = set()
    parts = [INTRODUCTION, STATUSES + _statuses(explained["statuses"])]
    for section in explained["section"]:
        rows = [_row(begin, text, messages, listed) for begin, text in section["messages"].items()]
        parts.append(
            f"## {section['title']}\n\n| message | meaning and remedy |\n|---|---|\n" + "".join(rows)
        )
    rest = [one for one in messages if one.kind != "other" and one.key not in listed]
    return "\n".join([*parts, OTHERS, *_others(rest)])


def find(begin: str, messages: list[Message]) -> Message:
    """Return the message that begins with `begin`; for messages that begin with a placeholder, `begin` may be
    in the middle."""
    matches = [one for one in messages if one.key.startswith(begin)]
    if not matches:
        raise SystemExit(f"{EXPLAINED.name}: no source has {begin!r}")
    return min(matches, key=lambda one: (("raised", "logged", "other").index(one.kind), len(one.key)))


def _row(begin: str, text: str, messages: list[Message], listed: set[str]) -> str:
    assert begin == key_of(begin), f"{begin!r}: holes are {{}}"
    listed.update(one.key for one in messages if one.key.startswith(begin))
    return f"| {_code(find(begin, messages).text)} | {text} |\n"


def _code(text: str) -> str:
    """Escape a text for a table's cell; the text may contain backticks."""
    shown = re.sub(r"\{\}|%[sd]", "{…}", text).replace("|", "\\|").strip(" ;")
    marks = "``" if "`" in shown else "`"
    space = " " if marks == "``" else ""
    return f"{marks}{space}{shown}{space}{marks}"


def _statuses(texts: dict[str, str]) -> str:
    if missing := {one.name for one in STATUS.values()} - texts.keys():
        raise SystemExit(f"{EXPLAINED.name}: no word about {', '.join(sorted(missing))}")
    return "".join(f"| {name} | {text} |\n" for name, text in texts.items())


def _others(rest: list[Message]) -> list[str]:
    """Return the messages by their context."""
    parts = []
    for title, kind, elsewhere in GROUPS:
        mine = [one for one in rest if one.kind == kind and not one.module.startswith(elsewhere or "?")]
        rest = [one for one in rest if one not in mine]
        lines = sorted({_code(one.text) for one in mine})
        parts.append(f"### {title}\n\n" + "".join(f"- {line}\n" for line in lines))
    return parts
