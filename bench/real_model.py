"""Provides the real model whose accuracy is measured, and English prose that it was not trained to recite."""

import re
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from tgis.shard.checkpoint.gguf_conversion import convert_gguf

MODELS = Path(__file__).parents[1] / ".cache" / "models"
FILE = MODELS / "SmolLM2-135M-Instruct.gguf"
_NOT_PROSE = re.compile(r"::=|>>>|->|\\|\[\d+\]|^\W+$|^ ", re.MULTILINE)
_ASIDES = re.compile(r"(Changed|New|Added|Deprecated|See also|Notes?|Prior|In Python)\b")


def convert_real_model(file: Path = FILE) -> Path:
    """Return the directory of a model with float32 weights, converted once: SmolLM2-135M-Instruct, unless
    `file` is another. `make` downloads the files."""
    directory = MODELS / file.stem
    if not (directory / "config.json").exists():
        convert_gguf([file], directory, "float32")
    return directory


def read_prose() -> Iterator[str]:
    """Yield the texts of Python's documentation, without markup and code, one line per paragraph."""
    known: set[str] = set()
    for name in sorted(topics):
        paragraphs = re.split(r"\n\s*\n", topics[name].strip())
        prose = [_strip_markup(paragraph) for paragraph in paragraphs if _is_prose(paragraph)]
        unique = [paragraph for paragraph in prose if paragraph not in known]
        known.update(unique)
        if unique:
            yield "\n\n".join(unique)


def _is_prose(paragraph: str) -> bool:
    return (
        len(paragraph) > 40
        and paragraph[-1] in ".:"
        and (paragraph[0].isupper() or paragraph[0] in '"*')
        and not _NOT_PROSE.search(paragraph)
        and not _ASIDES.match(paragraph)
    )


def _strip_markup(paragraph: str) -> str:
    joined = re.sub(r"\s+", " ", paragraph.replace("-\n", "-"))
    return re.sub(r"\*(\S[^*]*?\S|\S)\*", r"\1", joined)
