"""Converts tokenizers that transformers can read to `tokenizer.json`, the only format that the service
loads."""

import json
from importlib.util import find_spec
from pathlib import Path

from tgis.convert.atomic_write import ConversionError, move_files, staging_directory
from tgis.errors import first_line
from tgis.hub import model_files

FAST, SETTINGS, SPECIAL_TOKENS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
PROTOBUF_FIELD_1 = b"\n"  # first byte of a SentencePiece file; tiktoken's files are base64
OUR_ARGUMENTS = ("is_local", "local_files_only")  # arguments that transformers writes into the settings


def convert_to_fast_tokenizer(name: str, directory: Path, output: Path | None = None) -> str:
    """Write tokenizer.json and its settings to `output`, by default the model's directory; return a message.

    No file of the model's directory is replaced. Raises ConversionError."""
    if (directory / FAST).is_file():
        return f"Model {name} already has a fast tokenizer"
    if output is not None and not output.is_dir():
        return f"Output path {output} must exist and be a directory"
    if not model_files.has_tokenizer_to_convert(directory):
        raise ConversionError(f"{directory} contains no tokenizer")
    target = output or directory
    with staging_directory(target) as staged:
        _save(directory, staged)
        _add_settings(directory, staged)
        made = [staged / name for name in (SPECIAL_TOKENS, SETTINGS, FAST) if (staged / name).is_file()]
        if target.samefile(directory):
            # The model's own files stay unchanged, because the hub cache shares them with other revisions.
            made = [file for file in made if not (target / file.name).exists()]
        move_files(made, target, like=[_any_file(directory)] * len(made))
    return f"Saved tokenizer to {target}"


def _save(directory: Path, staged: Path) -> None:
    _check_packages(directory)
    import transformers

    transformers.logging.set_verbosity_error()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
        tokenizer.save_pretrained(str(staged))
    except Exception as error:  # damaged files cause errors of many types
        reason = first_line(error)
        raise ConversionError(f"the tokenizer of {directory} cannot be converted: {reason}") from error
    if not (staged / FAST).is_file():
        raise ConversionError(f"the tokenizer of {directory} cannot be converted: it has no fast version")


def _check_packages(directory: Path) -> None:
    """Check that sentencepiece or tiktoken is installed if the tokenizer needs it. Raises ConversionError."""
    needed = {"tiktoken"} if any(directory.glob("*.tiktoken")) else set()
    for file in directory.glob("*.model"):
        with file.open("rb") as content:
            needed.add("sentencepiece" if content.read(1) == PROTOBUF_FIELD_1 else "tiktoken")
    for package in sorted(needed):
        if find_spec(package) is None:
            raise ConversionError(
                f"the tokenizer of {directory} needs {package}: pip install 'tgis-next[tokenizers]'"
            )


def _add_settings(directory: Path, staged: Path) -> None:
    """Merge the model's own settings into those written by transformers; the model's take precedence."""
    written = model_files.read_json(staged, SETTINGS)
    for name in OUR_ARGUMENTS:
        written.pop(name, None)
    settings = written | model_files.read_json(directory, SETTINGS)
    (staged / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")
    if (directory / SPECIAL_TOKENS).is_file():
        (staged / SPECIAL_TOKENS).write_bytes((directory / SPECIAL_TOKENS).read_bytes())


def _any_file(directory: Path) -> Path:
    return next(path for pattern in model_files.TOKENIZER_FILES for path in directory.glob(pattern))
