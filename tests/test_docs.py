"""What the pages say can be typed: commands, flags and variables exist, or are listed here as somebody
else's; links and anchors lead somewhere; messages that are explained are in the source."""

import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import grpc
import pytest

from scripts import messages, observability_page, speed_picture, troubleshooting_page
from tests.support.pages import FLAG, VARIABLE, Command, Page, take_variables
from tgis.cli import main as cli
from tgis.cli.client.options import Connection
from tgis.config.aliases.tgis import PASSED_ON, TGIS_NAMES
from tgis.config.option import variables_of
from tgis.config.processes import LauncherConfig, RouterConfig, ShardConfig
from tgis.pb import generation_pb2 as pb
from tgis.router.api.lmi.options.names import KEYS, SIMPLE_NAMES
from tgis.router.api.registry import foreign_aliases
from tgis.tensor_files.gguf_types import TYPES

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
MAKEFILE = (ROOT / "Makefile").read_text()
OURS = re.compile(r"(make|tgis|text-generation-\w+) ")  # in the middle of a sentence
# Flags of tools of ours that are no commands of the package.
TOOLS = [*(ROOT / "bench").rglob("*.py"), *(ROOT / "integration_tests" / "chaos").glob("*.py")]

SERVER_NAMES = [one for one in foreign_aliases() if one.variable]
PROGRAMS = set("cd curl for grpcurl kubectl mkdir openssl pip podman printf python smg source".split())
# Flags, variables and further words in capitals that are others'.
FOREIGN_FLAGS = set(
    "--help --max-model-len --model --tensor-parallel-size --quantization --ssl-certfile --upgrade "
    "--disable-prompt-logprobs "
    # llama.cpp's
    "--alias --api-key-file --cache-type-k --cache-type-v --chat-template-file --ctx-size --hf-file "
    "--hf-repo --host --lora --parallel --rope-scale --threads "
    # Shepherd Model Gateway's
    "--health-check-interval-secs --health-failure-threshold".split()
)
FOREIGN_NAMES = set(
    "HF_ENDPOINT TMPDIR CHAOS HOSTNAME INFERENCE_PRECISION_HINT ADD_SPECIAL_TOKENS DISABLE_PROMPT_LOGPROBS "
    "ENABLE_VLLM_LOG_REQUESTS MASTER_SHARD_UDS_PATH AF_NETLINK TEMPLATE "
    "OLLAMA_HOST OLLAMA_CONTEXT_LENGTH OLLAMA_NUM_PARALLEL OLLAMA_KV_CACHE_TYPE".split()
) | {type.name for type in TYPES.values()}
PATH = re.compile(
    r"`([\w.-]+(?:/[\w.-]*)+|[\w-]+\.(?:py|proto|toml|md|yml))`"
)  # a file, or a folder with a slash
DEPLOYMENT_FILE = re.compile(r"(?<![\w/])deployment/[\w./-]*\w")


def ours() -> Iterator[click.Command]:
    waiting: list[click.Command] = [cli.main]
    while waiting:
        command = waiting.pop()
        yield command
        waiting += command.commands.values() if isinstance(command, click.Group) else []


def flags_of(command: click.Command) -> set[str]:
    options = [one for one in command.params if isinstance(one, click.Option)]
    return {name for one in options for name in (*one.opts, *one.secondary_opts)} | {
        "-h",
        "--help",
        "--version",
    }


def known_flags() -> set[str]:
    of_tools = {flag for path in TOOLS for flag in FLAG.findall(path.read_text())}
    return of_tools | FOREIGN_FLAGS | {name for one in ours() for name in flags_of(one)}


def known_names() -> set[str]:
    kinds = (LauncherConfig, RouterConfig, ShardConfig, Connection)
    own = [name for kind in kinds for name in variables_of(kind)]
    foreign = {one.variable_name for one in (*TGIS_NAMES, *SERVER_NAMES)} | PASSED_ON.keys()
    of_lmi = {f"OPTION_{key.removeprefix('option.')}" if "." in key else f"SERVING_{key}" for key in KEYS}
    foreign |= SIMPLE_NAMES.keys() | {name.upper() for name in of_lmi} | {"OPTION_ENGINE"}
    of_make = re.findall(r"\b([A-Z][A-Z_]+)\b", MAKEFILE)
    of_messages = [enum for one in pb.DESCRIPTOR.message_types_by_name.values() for enum in one.enum_types]
    of_file = pb.DESCRIPTOR.enum_types_by_name.values()
    enums = {value.name for enum in (*of_file, *of_messages) for value in enum.values}
    statuses = {code.name for code in grpc.StatusCode}
    return {*own, *foreign, *of_make, *enums, *statuses} | FOREIGN_NAMES


def wrong_with(command: Command) -> str | None:
    """Why nobody could type that."""
    if unknown := set(command.variables) - known_names():
        return f"no variable {unknown}"
    if not command.words:
        return None
    program, rest = Path(command.words[0]).name, list(command.words[1:])
    if program == "make":
        targets = [word for word in rest if "=" not in word]
        known = re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE)
        return next((f"no target {one}" for one in targets if one not in known), None)
    if program.startswith("--"):
        return next(
            (f"no flag {one}" for one in command.words if FLAG.fullmatch(one) and one not in known_flags()),
            None,
        )
    if program in SCRIPTS:
        module, _, name = SCRIPTS[program].partition(":")
        module = module.replace("tgis.cli.entry", "tgis.cli.main")  # the commands that entry points run
        return wrong_with_ours(getattr(importlib.import_module(module), name), rest)
    is_known = program in PROGRAMS or command.words[0].startswith("deployment/")
    return None if is_known else f"no program {program}"


def wrong_with_ours(command: object, words: list[str]) -> str | None:
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name = words.pop(0)
        if name not in command.commands:
            return f"no command {name}"
        command = command.commands[name]
    if not isinstance(command, click.Command):
        return None
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    hidden = (one for one in command.params if isinstance(one, click.Option) and one.hidden)
    of_servers = set() if "--compat" in given else {name for one in hidden for name in one.opts}
    unknown = given - (flags_of(command) - of_servers)
    return f"no flag {', '.join(sorted(unknown))}" if unknown else None


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_commands_can_be_typed(path: Path) -> None:
    inline = [take_variables(shlex.split(code)) for code in Page(path).inline if OURS.match(code)]
    commands = [*Page(path).commands(), *inline]
    assert not {" ".join(one.words): why for one in commands if (why := wrong_with(one))}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_flags_and_variables_exist(path: Path) -> None:
    codes = Page(path).inline
    flags = {flag for code in codes for flag in FLAG.findall(code)}
    names = {name for code in codes if (name := code.partition("=")[0]) and VARIABLE.fullmatch(name)}
    assert not flags - known_flags()
    assert not names - known_names()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    broken = []
    for link in Page(path).links:
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.is_file() or (anchor and anchor not in Page(target).anchors):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_examples_call_the_default_ports(path: Path) -> None:
    ports = set(re.findall(r"(?:curl|grpcurl|base_url=).*?localhost:(\d+)", path.read_text()))
    assert ports <= {"3000", "8033"}


def test_pages_are_all_in_the_navigation() -> None:
    named = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    there = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(named) == sorted(there)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: path.name)
def test_pages_open_with_their_question(path: Path) -> None:
    title, opening, *_ = path.read_text().split("\n\n")
    assert re.fullmatch("# .+", title)
    assert "This page " in opening


def test_the_readme_repeats_the_speeds_of_the_page_on_performance() -> None:
    text = (ROOT / "docs" / "performance.md").read_text()
    section = (ROOT / "README.md").read_text().split("\n## Speed\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\|.+\|[\d,. |]+\|$", section, re.MULTILINE)
    assert len(rows) == 6
    assert set(rows) <= set(text.splitlines())
    cases, series = speed_picture.read_table(text)
    assert [len(ratios) for ratios in series.values()] == [len(cases)] * 2


def test_faults_are_numbered_without_a_gap() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text()
    numbers = [int(number) for number in re.findall(r"^\| [A-J](\d+) \|", text, re.MULTILINE)]
    assert numbers == [*range(1, len(numbers) + 1)]
    for page in (text, (ROOT / "README.md").read_text()):
        assert re.findall(r"(\d+)\s+faults", page) == [str(len(numbers))]


def test_gpu_manifests_state_their_status() -> None:
    asking = [
        path for path in (ROOT / "deployment").rglob("kustomization.yaml") if "/gpu-" in path.read_text()
    ]
    assert len(asking) > 20
    silent = [
        path for path in asking if not path.read_text().startswith("# Asks for GPUs. The engine has run")
    ]
    assert not silent


def test_files_of_the_deployment_exist() -> None:
    """Those that are named in full."""
    named = {name for path in PAGES for name in DEPLOYMENT_FILE.findall(Page(path).text)}
    missing = {name for name in named if not (ROOT / name).exists()}
    assert named
    assert not missing


def missing_paths(text: str) -> list[str]:
    """Return the files and folders in backticks that do not exist, by their paths from the root."""
    names = PATH.findall(text)
    return [
        name for name in names if not ((ROOT / name).is_dir() if name[-1] == "/" else (ROOT / name).is_file())
    ]


def test_architecture_names_files_and_folders_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert len(PATH.findall(text)) > 60
    assert missing_paths(text) == []


def test_a_path_that_does_not_exist_is_found() -> None:
    there, missing = (
        "`tgis/logs.py`, `tgis/cli/`",
        "`tgis/lags.py`, `tgis/clio/`, `tgis/logs.py/`, `nowhere.toml`",
    )
    assert missing_paths(f"{there}, {missing}, `min_p` and `a.b`") == [
        "tgis/lags.py",
        "tgis/clio/",
        "tgis/logs.py/",
        "nowhere.toml",
    ]


def test_how_it_works_names_files_that_exist_and_every_package() -> None:
    """A package of one that is named counts as named with it, but for those of the router and the shard."""
    package, text = ROOT / "tgis", (ROOT / "docs" / "how-it-works.md").read_text()
    steps, packages = text.split("## A request in eight steps")[1].split("## Packages")
    named = re.findall(r"`((?:router|shard)/[\w/]+)`", steps)
    assert len(named) > 20
    assert [
        name for name in named if not (package / name).is_dir() and not (package / f"{name}.py").is_file()
    ] == []
    rows = set(re.findall(r"^\| `([\w/]+)` \|", packages, re.MULTILINE))
    there = {path.parent for path in package.rglob("__init__.py")} - {package, package / "pb"}
    names = {path.relative_to(package).as_posix() for path in there} - {"router", "shard"}
    assert rows == {name for name in names if name.count("/") == name.startswith(("router/", "shard/"))}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tgis client stream --max-tokens 5 x", "no flag --max-tokens"),
        ("tgis client ask x", "no command ask"),
        ("text-generation-launcher --model-id org/model", "no flag --model-id"),
        ("text-generation-launcher --compat tgi --model-id org/model", None),
        ("MODEL=x make run", "no variable {'MODEL'}"),
        ("make everything", "no target everything"),
        ("true && grpcurl localhost:8033", "no program true"),
    ],
)
def test_untypable_characters_are_reported(text: str, why: str | None, tmp_path: Path) -> None:
    page = Page(tmp_path / "page.md")
    page.path.write_text(f"```shell\n{text}  # a comment\n```\n")
    assert wrong_with(next(page.commands())) == why


def test_pages_are_read_as_they_look(tmp_path: Path) -> None:
    page = Page(tmp_path / "page.md")
    page.path.write_text("# A `b` c\n\n`--flag X` [one](two.md#three)\n\n```\n`--other` [x](y.md)\n```\n")
    assert (page.inline, page.links, page.anchors) == (["b", "--flag X"], ["two.md#three"], {"a-b-c"})


def test_a_message_that_has_left_the_source_is_found() -> None:
    collected = messages.collect(ROOT / "tgis" / "router")
    assert troubleshooting_page.find("Model is overloaded", collected).kind == "raised"
    with pytest.raises(SystemExit, match="no source has 'Model is tired'"):
        troubleshooting_page.find("Model is tired", collected)


def test_an_alert_without_a_cure_is_found() -> None:
    rule = {"alert": "A", "expr": "x > 1", "for": "5m", "labels": {"severity": "info"}}
    [text] = observability_page.alerts([rule, {"record": "r", "expr": "x"}], {"A": "Do it."})
    assert text == "### A\n\nInfo, for 5m:\n\n```promql\nx > 1\n```\n\nDo it.\n"
    for cures in ({}, {"A": "Do it.", "B": "Do that."}):
        with pytest.raises(SystemExit, match="not an alert of both"):
            observability_page.alerts([rule], cures)


def test_messages_are_read_from_any_source(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "a.py").write_text(
        "LIMIT = 3\nclass OwnError(OperatorError): pass\n"
        'def f(x, y):\n    """A docstring is no message."""\n'
        '    logger.warning("it took %.1f s of %s, too long", x.seconds, y)\n'
        '    raise OwnError(f"more than {LIMIT} of {x.name} " "were given" if x else "none was given")\n'
    )
    collected = [(one.kind, one.text) for one in messages.collect(tmp_path / "own") if one.kind != "other"]
    assert collected == [
        ("raised", "more than 3 of {name} were given"),
        ("raised", "none was given"),
        ("logged", "it took {seconds} s of {y}, too long"),
    ]
