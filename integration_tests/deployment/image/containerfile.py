"""Parses a Containerfile as a container engine does, and checks our rules for it."""

import json
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|API_?KEY", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{(\w+)\}|\$(\w+)")


@dataclass(frozen=True)
class Stage:
    base: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, keyword: str) -> list[str]:
        return [text for word, text in self.instructions if word == keyword]

    def pairs(self, keyword: str) -> dict[str, str]:
        """Return the pairs of instructions like ENV and LABEL."""
        words = chain(*(shlex.split(text) for text in self.all(keyword)))
        return dict(word.split("=", 1) for word in words)


@dataclass(frozen=True)
class Containerfile:
    stages: list[Stage]
    arguments: Mapping[str, str]

    @property
    def final(self) -> Stage:
        return self.stages[-1]

    @property
    def command(self) -> list[str]:
        words: list[str] = json.loads(self.final.all("CMD")[-1])
        return words


def read(text: str) -> Containerfile:
    stages: list[Stage] = []
    arguments: dict[str, str] = {}
    for keyword, rest in _instructions(text):
        if keyword == "ARG":
            name, _, default = rest.partition("=")
            arguments[name] = default
        if keyword == "FROM":
            base, *name = re.split(r"\s+AS\s+", rest, flags=re.IGNORECASE)
            stages.append(Stage(expand(base, arguments), name[0] if name else str(len(stages))))
        elif stages:
            stages[-1].instructions.append((keyword, rest))
    return Containerfile(stages, arguments)


def expand(text: str, values: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda match: values.get(match[1] or match[2], ""), text)


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        keyword, rest = line.split(maxsplit=1)
        yield keyword.upper(), " ".join(rest.split())


def faults(file: Containerfile, scripts: Collection[str], made_by_steps: str) -> Iterator[str]:
    """Yield the errors. `scripts` are the commands that the project installs; `made_by_steps` is the text of
    the script that the stages run."""
    yield from _faults_of_bases(file)
    yield from _faults_of_copies(file, made_by_steps)
    for stage in file.stages:
        names = [*stage.pairs("ENV"), *(text.partition("=")[0] for text in stage.all("ARG"))]
        yield from (f"{name} looks like a secret" for name in names if SECRET.search(name))
        yield from ("ADD may fetch or unpack: write COPY" for _ in stage.all("ADD"))
    user = (file.final.all("USER") or ["root"])[-1]
    if not re.fullmatch(r"[1-9]\d*:0", user):
        yield f"the image's user is {user}, not a number above 0 with group 0"
    probes = [json.loads(text.partition("CMD ")[2]) for text in file.final.all("HEALTHCHECK")]
    for words in [file.command, *probes]:
        if words[0] not in scripts:
            yield f"{words[0]} is no command of the project"


def _faults_of_bases(file: Containerfile) -> Iterator[str]:
    for position, stage in enumerate(file.stages):
        _, colon, tag = stage.base.rpartition(":")
        is_stage = stage.base in {earlier.name for earlier in file.stages[:position]}
        if not is_stage and (not colon or tag in ("", "latest")):
            yield f"{stage.base} is not pinned"


def _faults_of_copies(file: Containerfile, made_by_steps: str) -> Iterator[str]:
    """Check that files copied from a stage are created there: by the stage or by the steps that it runs."""
    for position, stage in enumerate(file.stages):
        earlier = {one.name: one for one in file.stages[:position]}
        for text in stage.all("COPY"):
            if not (match := re.match(r"--from=(\S+) (?:--\S+ )*(\S+) ", text)):
                continue
            source = earlier.get(match[1])
            known = source and " ".join(text for _, text in source.instructions) + made_by_steps
            if known is None:
                yield f"COPY --from={match[1]}: there is no such stage before"
            elif match[2] != "/" and not re.search(rf"{re.escape(match[2])}(?![\w/-])", known):
                yield f"COPY --from={match[1]} {match[2]}: nothing makes it there"
