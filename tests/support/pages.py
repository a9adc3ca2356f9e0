"""Parses pages' Markdown for commands, flags, variables and links."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|[A-Z]{4,}")
ASSIGNMENT = re.compile(r"([A-Z][A-Z0-9_]+)=")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.*)$", re.MULTILINE)
COMMENT = re.compile(r"(?:^|(?<=\s))# .*$", re.MULTILINE)
KEYWORDS = ("do", "then", "done", "fi")
STEPS_OVER = ("sudo", "nohup", "exec", "export", "timeout")


@dataclass(frozen=True)
class Command:
    """Words of a shell line, the program first, and the variables set before it."""

    words: tuple[str, ...]
    variables: tuple[str, ...]


@dataclass(frozen=True)
class Page:
    path: Path

    @property
    def text(self) -> str:
        return self.path.read_text()

    @property
    def prose(self) -> str:
        """Return the text without code blocks."""
        return FENCE.sub("", self.text)

    @property
    def shell(self) -> list[str]:
        return [block for language, block in FENCE.findall(self.text) if language in ("shell", "bash", "sh")]

    @property
    def inline(self) -> list[str]:
        return INLINE.findall(self.prose)

    @property
    def links(self) -> list[str]:
        return [target for target in LINK.findall(self.prose) if "://" not in target]

    @property
    def anchors(self) -> set[str]:
        """Return the anchors of headings, which are the same on GitHub and on the site."""
        result: set[str] = set()
        for heading in HEADING.findall(self.prose):
            text = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading).strip().lower()
            slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
            result.add(slug if slug not in result else f"{slug}_1")
        return result

    def commands(self) -> Iterator[Command]:
        for block in self.shell:
            for words in split(block):
                yield take_variables(words)


def split(block: str) -> Iterator[list[str]]:
    """Yield the commands of a block in order."""
    lexer = shlex.shlex(COMMENT.sub("", block).replace("\\\n", " "), posix=True, punctuation_chars=";&|()\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    words: list[str] = []
    for word in lexer:
        if word.strip(";&|()\n") and word not in KEYWORDS:
            words.append(word)
            continue
        if words:
            yield words
        words = []
    if words:
        yield words


def take_variables(words: list[str]) -> Command:
    variables = []
    while words and (match := ASSIGNMENT.match(words[0])):
        variables.append(match[1])
        words = words[1:]
    if words and words[0] in STEPS_OVER:
        return take_variables(words[1:])
    return Command(tuple(words), tuple(variables))
