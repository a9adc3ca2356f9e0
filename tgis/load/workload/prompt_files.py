"""Reads prompts from JSON lines, and from ShareGPT's files."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tgis.load.errors import LoadError
from tgis.load.workload.constraints import TextRule

USERS = ("human", "user")


@dataclass(frozen=True)
class FilePrompt:
    """Conversation of a file; the lists have an entry per turn of the user."""

    texts: tuple[str, ...]
    new_tokens: tuple[int, ...]
    """0: not given."""
    answers: tuple[str, ...]
    """Recorded answers, whose lengths are wanted if no number is given."""
    rule: TextRule | None = None


@cache
def read_prompts(path: Path) -> list[FilePrompt]:
    """Return the prompts of a file. Raises LoadError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"the prompts {path} cannot be read: {error}") from error
    prompts = [
        read for number, entry in _entries(path, text) if (read := _read(entry, f"{path}: entry {number}"))
    ]
    if not prompts:
        raise LoadError(f"{path} has no prompts")
    return prompts


def _entries(path: Path, text: str) -> Iterable[tuple[int, Any]]:
    try:
        if text.lstrip().startswith("["):
            return list(enumerate(json.loads(text), 1))
        return [
            (number, json.loads(line)) for number, line in enumerate(text.splitlines(), 1) if line.strip()
        ]
    except ValueError as error:
        raise LoadError(f"{path} is neither JSON lines nor a JSON array: {error}") from error


def _read(entry: Any, place: str) -> FilePrompt | None:
    """Return the prompt, or None for a conversation without a user."""
    try:
        if "conversations" in entry:
            return _read_turns([(turn["from"], turn["value"]) for turn in entry["conversations"]])
        if "messages" in entry:
            return _read_turns([(turn["role"], turn["content"]) for turn in entry["messages"]])
        new_tokens = int(entry.get("max_new_tokens") or entry.get("output_tokens") or 0)
        return FilePrompt((str(entry["prompt"]),), (new_tokens,), ("",), _read_rule(entry))
    except (KeyError, TypeError, ValueError) as error:
        raise LoadError(f"{place} has no prompt, messages or conversations") from error


def _read_turns(turns: list[tuple[str, str]]) -> FilePrompt | None:
    texts, answers = list[str](), list[str]()
    for role, text in turns:
        if role in USERS:
            texts.append(text)
            answers.append("")
        elif texts and not answers[-1]:
            answers[-1] = text
    return FilePrompt(tuple(texts), (0,) * len(texts), tuple(answers)) if texts else None


def _read_rule(entry: dict[str, Any]) -> TextRule | None:
    if "json_schema" in entry:
        return TextRule("json", entry["json_schema"])
    if "regex" in entry:
        return TextRule("regex", entry["regex"])
    return TextRule("choice", entry["choices"]) if "choices" in entry else None
