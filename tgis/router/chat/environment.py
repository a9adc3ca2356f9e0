"""Environment of chat templates: Jinja2 in a sandbox, with the names that transformers adds."""

import datetime
import json
from collections.abc import Iterable
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class RefusedChatError(TemplateError):
    """Error that a template raises deliberately, with the template's own text."""


class GenerationMark(Extension):
    """Tag `generation`, which marks the model's own texts for training. Its body is rendered without the
    tag."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class PlainNamespace(Namespace):
    """Namespace without private names, with which a template could escape the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a value may have the name `self`
        self, *rest = args
        values = dict(*rest, **kwargs)
        _require_public(values)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public([name])
        super().__setitem__(name, value)


class DictMaker:
    """Function `dict` without the attributes of the class `dict`."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def make_environment() -> ImmutableSandboxedEnvironment:
    extensions = [GenerationMark, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = DictMaker()
    environment.globals["namespace"] = PlainNamespace
    return environment


def _require_public(names: Iterable[object]) -> None:
    if any(isinstance(name, str) and name.startswith("_") for name in names):
        raise SecurityError("a namespace must not have private names")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Convert the value to JSON, without the HTML escapes of Jinja2's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> NoReturn:
    raise RefusedChatError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
