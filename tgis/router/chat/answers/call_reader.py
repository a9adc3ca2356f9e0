"""Parses one tool call, after the parts that precede it."""

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from itertools import takewhile

from tgis.router.chat.answers import python_arguments, tagged_value
from tgis.router.chat.answers.json_text import write_json
from tgis.router.chat.answers.loose_value import to_json
from tgis.router.chat.answers.pieces import CallArguments, CallBegin, Piece
from tgis.router.chat.answers.text_source import TextSource, Wait
from tgis.router.chat.formats.types import JsonCall, LooseCall, NamedCall, PythonCall, TaggedCall, ToolFormat

# Further keys with text values that models write into a call.
OTHER_KEYS = frozenset(("type", "id"))
NO_ARGUMENTS = "{}"


@dataclass
class _Head:
    """State of a call that is an object, until it is emitted."""

    name: str | None = None
    arguments: list[str] = field(default_factory=list)
    """Parts of the arguments, if they precede the name."""
    is_emitted: bool = False


class CallReader:
    """Parser of calls in one format."""

    def __init__(
        self,
        format: ToolFormat,
        names: Set[str],
        source: TextSource,
        emit: Callable[[Piece], None],
        texts: Set[tuple[str, str]] = frozenset(),
    ) -> None:
        """Create a reader. `texts` are the functions and parameters whose values are texts."""
        self._format = format
        self._names = names
        self._source = source
        self._emit = emit
        self._texts = texts

    def read(self) -> Wait[bool]:
        """Parse a call and the parts after it. If there is no call, hold the text and return False."""
        match self._format.body:
            case JsonCall() as body:
                is_call = yield from self._read_object(body)
            case NamedCall() as body:
                is_call = yield from self._read_named(body)
            case PythonCall():
                is_call = yield from self._read_python()
            case LooseCall() as body:
                is_call = yield from self._read_loose(body)
            case TaggedCall() as body:
                is_call = yield from self._read_tagged(body)
        if is_call and (yield from self._source.has_all(self._format.call[1], may_be_cut=True)):
            self._source.held.clear()
        return is_call

    def may_begin(self) -> Wait[bool]:
        """Return True if the character that comes next can begin a call."""
        first = yield from self._source.next_character()
        return first.isalpha() or first == "_" if isinstance(self._format.body, PythonCall) else first == "{"

    def _read_named(self, body: NamedCall) -> Wait[bool]:
        source = self._source
        yield from source.skip_space()
        name = yield from source.has_any(tuple(self._names))
        if name is None:
            return False
        if body.id_mark and (yield from source.has_all((body.id_mark,))):
            yield from source.skip_space()
            yield from source.skip_id()
        if not (yield from source.has_all((body.separator,))):
            return False
        yield from source.skip_space()
        if (yield from source.begins_value()) != "{":
            return False
        yield from self._stream_arguments(name)
        return True

    def _read_loose(self, body: LooseCall) -> Wait[bool]:
        source = self._source
        yield from source.skip_space()
        name = yield from source.has_any(tuple(self._names))
        yield from source.skip_space()
        if name is None or (yield from source.begins_value()) != "{":
            return False
        if (yield from source.begins_json()):
            yield from self._stream_arguments(name)
            return True
        text = yield from source.text_before(self._format.call[1][0])
        self._emit_call(name, to_json(text, body.quote))
        return True

    def _read_python(self) -> Wait[bool]:
        source = self._source
        yield from source.skip_space()
        name = yield from source.has_any(tuple(self._names))
        if name is None or not (yield from source.has_all(("(",))):
            return False
        parts: list[str] = []
        yield from source.value(parts.append, python_arguments.ArgumentsScanner())
        source.held += parts
        arguments = python_arguments.to_json("".join(parts))
        if arguments is None:
            return False
        self._emit_call(name, arguments)
        return True

    def _read_tagged(self, body: TaggedCall) -> Wait[bool]:
        source = self._source
        yield from source.skip_space()
        name = yield from source.has_any(tuple(self._names))
        if name is None or not (yield from source.has_all((body.name_end,))):
            return False
        separator = "{"
        while (yield from source.has_all((body.key_begin,))):
            key, is_text = yield from self._read_tagged_key(body, name)
            if is_text is None:
                break
            if separator == "{":
                source.held.clear()
                self._emit(CallBegin(name))
            self._emit(CallArguments(f"{separator}{write_json(key)}: "))
            separator = ", "
            if not (yield from self._read_tagged_value(body, is_text)):
                return True
        if separator == "{":
            if not (yield from source.is_before(self._format.call[1][0].strip())):
                return False
            self._emit_call(name, NO_ARGUMENTS)
            return True
        self._emit(CallArguments("}"))
        return True

    def _read_tagged_key(self, body: TaggedCall, name: str) -> Wait[tuple[str, bool | None]]:
        """Parse a key up to its value. Return the key, and whether the value is a text; None if the text is
        malformed."""
        source = self._source
        ends = tuple(end.strip() for end in (body.key_end, body.text_key_end or body.key_end))
        key = yield from source.text_before(_common_begin(*ends))
        source.held.append(key)
        end = yield from source.has_any(ends)
        if end is None or (body.value_begin and not (yield from source.has_all((body.value_begin,)))):
            return key, None
        return key, end == ends[1] if body.text_key_end else (name, key) in self._texts

    def _read_tagged_value(self, body: TaggedCall, is_text: bool) -> Wait[bool]:
        """Parse a value and its end. Return False if the text ends before it."""
        end = body.value_end.strip()
        text = yield from self._source.text_before(end)
        self._source.held.clear()
        if not (yield from self._source.has(end)):
            return False
        self._source.held.clear()
        if body.value_end.startswith("\n"):
            text = text.removeprefix("\n").removesuffix("\n")
        self._emit(CallArguments(tagged_value.to_json(text, is_text)))
        return True

    def _read_object(self, body: JsonCall) -> Wait[bool]:
        source = self._source
        head = _Head()
        separator = "{"
        while (yield from source.has_all((separator,))) and (yield from self._read_member(body, head)):
            if head.is_emitted:
                yield from self._read_rest()
                return True
            if (yield from source.has_all(("}",))):
                if head.name is not None:
                    self._emit_call(head.name, NO_ARGUMENTS)
                return head.name is not None
            separator = ","
        return False

    def _read_member(self, body: JsonCall, head: _Head) -> Wait[bool]:
        """Parse a member of the object. Return False if it cannot be part of a call."""
        source = self._source
        key = yield from self._read_key()
        if key == body.name_key:
            return (yield from self._read_name(head))
        if key == body.arguments_key and not head.arguments:
            return (yield from self._read_arguments(head))
        return key in OTHER_KEYS and (yield from source.string()) is not None

    def _read_name(self, head: _Head) -> Wait[bool]:
        name = yield from self._source.string()
        if name is None or name not in self._names:
            return False
        head.name = name
        if head.arguments:
            self._emit_call(name, "".join(head.arguments))
            head.is_emitted = True
        return True

    def _read_arguments(self, head: _Head) -> Wait[bool]:
        source = self._source
        if not (yield from source.begins_value()):
            return False
        if head.name is None:
            yield from source.value(head.arguments.append)
            source.held += head.arguments
            return True
        yield from self._stream_arguments(head.name)
        head.is_emitted = True
        return True

    def _read_key(self) -> Wait[str | None]:
        """Parse a member's key up to its value, and return the key; None if there is none."""
        source = self._source
        yield from source.skip_space()
        key = yield from source.string()
        if key is None or not (yield from source.has_all((":",))):
            return None
        yield from source.skip_space()
        return key

    def _stream_arguments(self, name: str) -> Wait[None]:
        self._source.held.clear()
        self._emit(CallBegin(name))
        yield from self._source.value(lambda text: self._emit(CallArguments(text)))

    def _emit_call(self, name: str, arguments: str) -> None:
        self._source.held.clear()
        self._emit(CallBegin(name))
        self._emit(CallArguments(arguments))

    def _read_rest(self) -> Wait[None]:
        """Parse the object's members after the arguments, and its end, which models may omit."""
        source = self._source
        while not (yield from source.has_all(("}",))):
            if not (yield from source.has(",")) or (yield from self._read_key()) is None:
                return
            yield from source.value(source.held.append)
        source.held.clear()


def _common_begin(one: str, other: str) -> str:
    """Return the longest text that begins both texts."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(character for character, _ in pairs)
