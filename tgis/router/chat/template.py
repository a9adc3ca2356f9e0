"""Loads a model's chat templates and the special tokens that they use."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tgis.hub.gguf_files import find_named_place
from tgis.hub.model_files import read_json
from tgis.process.worker_pool import ask_once
from tgis.router.errors import StartupError

logger = logging.getLogger(__name__)

WORKER = "tgis.router.chat.worker"
CHECK_TIMEOUT_S = 30.0
MAX_BYTES = 1 << 20
DEFAULT = "default"
TOOL_USE = "tool_use"
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
OLD_TEMPLATE_FILE = "chat_template.json"
CONFIG_FILE = "tokenizer_config.json"
TOKENS_FILE = "special_tokens_map.json"
SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


@dataclass(frozen=True)
class ChatTemplate:
    """Checked templates of a model, and the variables that all chats share."""

    default: str
    tool_use: str | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)
    takes_content_parts: bool = False
    """True if the templates expect a message's content as a list of parts."""
    variables: frozenset[str] = frozenset()
    """Variables that the templates use."""

    @property
    def text(self) -> str:
        """Text of all templates."""
        return self.default + (self.tool_use or "")

    def text_for(self, has_tools: bool) -> str:
        return self.tool_use if has_tools and self.tool_use is not None else self.default


def load_template(directory: Path, file: str | None, config_file: str | None = None) -> ChatTemplate | None:
    """Return the templates in `file`, or else in the model's directory; None if there are none.

    `config_file` replaces the directory's tokenizer_config.json, and its template takes precedence. This
    blocks until the templates are checked. Raises StartupError and ModelNotFoundError."""
    config = _read_config(Path(config_file)) if config_file else read_json(directory, CONFIG_FILE)
    texts, source = _find_texts(directory, config, file, config_file)
    if DEFAULT not in texts:
        logger.info("the model has no chat template, so chats are refused; --chat-template sets one")
        return None
    named = find_named_place(directory)
    is_converted = named != directory and Path(source).parent == directory
    logger.info("chats use the template of %s", named if is_converted else source)
    older = read_json(directory, TOKENS_FILE)
    tokens = _special_tokens(older | config, {}) if config_file else _special_tokens(config, older)
    used = {name: texts[name] for name in (DEFAULT, TOOL_USE) if name in texts}
    checks = [_check(text, _title(file, name)) for name, text in used.items()]
    return ChatTemplate(
        texts[DEFAULT],
        texts.get(TOOL_USE),
        tokens,
        takes_content_parts=all(check["takes_content_parts"] for check in checks),
        variables=frozenset(name for check in checks for name in check["variables"]),
    )


def _find_texts(
    directory: Path, config: dict[str, Any], file: str | None, config_file: str | None
) -> tuple[dict[str, str], str]:
    """Return the templates by name, and the path of the default template. The templates come from the first
    source that has any; the default may come from a later source."""
    if file is not None:
        return {DEFAULT: _read_text(Path(file))}, file
    in_files = {path.stem: _read_text(path) for path in sorted((directory / TEMPLATE_FOLDER).glob("*.jinja"))}
    if (directory / TEMPLATE_FILE).is_file():
        in_files[DEFAULT] = _read_text(directory / TEMPLATE_FILE)
    in_config = _by_name(config.get("chat_template"), config_file or CONFIG_FILE)
    old = _by_name(read_json(directory, OLD_TEMPLATE_FILE).get("chat_template"), OLD_TEMPLATE_FILE)
    sources = [(directory / TEMPLATE_FILE, in_files), (directory / CONFIG_FILE, in_config)]
    if config_file:
        sources = [(Path(config_file), in_config), sources[0]]
    sources.append((directory / OLD_TEMPLATE_FILE, old))
    texts = next((templates for _, templates in sources if templates), {})
    for path, templates in sources:
        if DEFAULT in templates:
            return texts | {DEFAULT: templates[DEFAULT]}, str(path)
    return texts, ""


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise StartupError(f"tokenizer_config_path: {path} is not a file")
    return read_json(path.parent, path.name)


def _by_name(value: object, file: str) -> dict[str, str]:
    match value:
        case None:
            return {}
        case str():
            return {DEFAULT: value}
        case list() if all(_is_named(entry) for entry in value):
            return {entry["name"]: entry["template"] for entry in value}
        case _:
            raise StartupError(f"chat_template in {file} must be a text or a list of names and templates")


def _is_named(entry: object) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("name", "template"))


def _special_tokens(config: dict[str, Any], older: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens by name. The older file takes precedence only if the other has no token
    table."""
    values = older | config if "added_tokens_decoder" in config else config | older
    texts = {name: _token_text(values.get(name)) for name in SPECIAL_TOKENS}
    return {name: text for name, text in texts.items() if text is not None}


def _token_text(value: object) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise StartupError(f"the chat template {path} has more than {MAX_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise StartupError(f"the chat template {path} cannot be read: {error.strerror}") from error
    except UnicodeError as error:
        raise StartupError(f"the chat template {path} cannot be read: it is not UTF-8") from error


def _title(file: str | None, name: str) -> str:
    if file is not None:
        return f"the chat template {file}"
    return "the model's chat template" if name == DEFAULT else f"the model's chat template {name}"


def _check(text: str, title: str) -> dict[str, Any]:
    """Return the worker's analysis of a template. Raises StartupError if it does not compile."""
    try:
        reply = ask_once(WORKER, {"check": text}, CHECK_TIMEOUT_S)
    except UnicodeEncodeError as error:
        raise StartupError(f"{title} is not valid Unicode") from error
    if reply.is_dead:
        raise StartupError(f"{title} takes too long to compile, or too much memory")
    if "error" in reply.value:
        raise StartupError(f"{title} does not compile: {reply.value['error']}")
    analysis: dict[str, Any] = reply.value
    return analysis
