"""Writes the directory from which a GGUF model is served: links to its files, and the configuration and
tokenizer derived from their metadata."""

import json
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from tgis.convert.gguf.architectures import find_architecture, make_config
from tgis.convert.gguf.files import GgufFiles, open_gguf
from tgis.convert.gguf.metadata import Metadata, cut
from tgis.convert.gguf.tensor_names import refuse_unknown
from tgis.convert.gguf.tokenizer import CONTROL, KEY, GgufVocabulary, make_settings, make_tokenizer
from tgis.errors import first_line
from tgis.hub.gguf_files import SUFFIX, TOKENIZER, UNFINISHED_TOKENIZER

logger = logging.getLogger(__name__)

CONFIG = "config.json"
TEMPLATE, TEMPLATES = "tokenizer.chat_template", "tokenizer.chat_templates"
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Tokens that end a turn or a text in every model whose vocabulary has them.
ENDS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<EOT>", "_<EOT>"),
    *("<|end_of_text|>", "<|endoftext|>"),
)
# Ends of answers in Harmony, where <|end|> ends only a message.
HARMONY_ENDS = ("<|return|>", "<|call|>")
HARMONY_MESSAGE_END = "<|end|>"


def write_model_directory(paths: Sequence[Path], directory: Path) -> None:
    """Write the files and links into an empty directory, the tokenizer last. Raises ConversionError."""
    files = open_gguf(paths)
    vocabulary = _write_descriptions(files, directory)
    types = Counter(tensor.place.type.name for tensor in files.tensors.values())
    counts = ", ".join(f"{count} of {name}" for name, count in types.most_common())
    logger.info("a model of architecture %s, with tensors: %s", files.metadata.architecture, counts)
    _link_files(paths, directory)
    unfinished = directory / UNFINISHED_TOKENIZER
    unfinished.touch()
    make_tokenizer(vocabulary).save(str(unfinished), pretty=False)
    unfinished.replace(directory / TOKENIZER)


def write_weights_directory(paths: Sequence[Path], directory: Path) -> None:
    """Write the configuration and the links, without a tokenizer. Raises ConversionError."""
    _write_config(open_gguf(paths), directory)
    _link_files(paths, directory)


def _link_files(paths: Sequence[Path], directory: Path) -> None:
    for number, path in enumerate(paths):
        name = path.name if path.suffix == SUFFIX else f"{number:05}{SUFFIX}"
        (directory / name).symlink_to(path.absolute())


def write_settings(files: GgufFiles, directory: Path) -> None:
    """Write configuration, tokenizer and templates. Raises ConversionError."""
    vocabulary = _write_descriptions(files, directory)
    make_tokenizer(vocabulary).save(str(directory / TOKENIZER), pretty=False)


def _write_descriptions(files: GgufFiles, directory: Path) -> GgufVocabulary:
    """Write configuration and templates. Return the vocabulary, which lacks only the tokenizer's file."""
    _write_config(files, directory)
    vocabulary = GgufVocabulary(files.metadata)
    settings = make_settings(vocabulary) | _read_templates(files.metadata)
    _write(directory / "tokenizer_config.json", settings)
    _write(directory / "generation_config.json", _make_generation_config(vocabulary))
    return vocabulary


def _write_config(files: GgufFiles, directory: Path) -> None:
    architecture = find_architecture(files)
    refuse_unknown(files, architecture.names)
    _write(directory / CONFIG, make_config(files, architecture))


def _make_generation_config(vocabulary: GgufVocabulary) -> dict[str, Any]:
    metadata = vocabulary.metadata
    ends = {vocabulary.ids[token] for key in END_KEYS if (token := vocabulary.find(key)) is not None}
    ends |= {
        id
        for text in (*ENDS, *HARMONY_ENDS)
        if (id := vocabulary.ids.get(text)) is not None and vocabulary.types[id] == CONTROL
    }
    if all(text in vocabulary.ids for text in HARMONY_ENDS):
        ends = ends - {vocabulary.ids.get(HARMONY_MESSAGE_END)}
    config: dict[str, Any] = {"eos_token_id": sorted(ends)} if ends else {}
    for key, name in (("bos_token_id", "bos_token_id"), ("padding_token_id", "pad_token_id")):
        if vocabulary.find(key) is not None:
            config[name] = metadata.token_id(KEY + key)
    return config


def _read_templates(metadata: Metadata) -> dict[str, Any]:
    """Return the setting for the chat template, or for all templates if there are several.

    Raises ConversionError."""
    if TEMPLATE not in metadata:
        return {}
    default = _read_template(metadata, TEMPLATE)
    names = metadata.texts(TEMPLATES) if TEMPLATES in metadata else []
    others = [name for name in names if name != "default"]
    if not others:
        return {"chat_template": default}
    named = [{"name": name, "template": _read_template(metadata, f"{TEMPLATE}.{name}")} for name in others]
    return {"chat_template": [{"name": "default", "template": default}, *named]}


def _read_template(metadata: Metadata, key: str) -> str:
    text = metadata.text(key)
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])  # noqa: S701 # nothing is rendered
    try:
        environment.parse(text.replace("{% generation %}", "").replace("{% endgeneration %}", ""))
    except (jinja2.TemplateSyntaxError, RecursionError) as error:
        raise metadata.refuse(key, f"does not parse: {cut(first_line(error))}") from error
    return text


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
