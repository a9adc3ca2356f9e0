"""Calibration data: windows of tokens drawn at random from a text, and held-out windows from its end."""

import glob
import importlib
import json
import logging
import random
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from tokenizers import Tokenizer

from tgis.errors import first_line
from tgis.hub import model_files
from tgis.hub.cache import find_snapshot
from tgis.shard.quantize.settings import QuantizeError, QuantizeSettings

logger = logging.getLogger(__name__)

HELD_OUT_SHARE, HELD_OUT_WINDOWS = 10, 16  # a tenth of the text, but no more than this many windows
DATASETS = ("datasets--Salesforce--wikitext", "datasets--wikitext")
WIKITEXT = "wikitext-2-raw-v1/train-*.parquet"


@dataclass(frozen=True)
class Calibration:
    """Windows of token ids. Each begins with the tokens that the tokenizer prepends to every text."""

    samples: list[list[int]]
    held_out: list[list[int]]

    @property
    def digest(self) -> str:
        return sha256(json.dumps([self.samples, self.held_out]).encode()).hexdigest()


def read_calibration(
    directory: Path, file: Path | None, cache: Path, settings: QuantizeSettings
) -> Calibration:
    """Return windows of the text of `file`, or of wikitext-2 from the hub's cache. Raises QuantizeError."""
    config = model_files.read_config(directory)
    length = min(settings.seqlen, model_files.max_sequence_length(config))
    text = _read_wikitext(cache) if file is None else _read_text(file)
    prefix, ids = _tokenize(directory, text)
    calibration = draw_windows(prefix, ids, length, settings, str(file or "wikitext-2"))
    num_held_out = sum(len(window) - len(prefix) for window in calibration.held_out)
    logger.info(
        "calibrating with %d windows of %d tokens; the last %d of the text's %d tokens are held out to "
        "measure the loss",
        len(calibration.samples),
        length,
        num_held_out,
        len(ids),
    )
    return calibration


def draw_windows(
    prefix: list[int], ids: list[int], length: int, settings: QuantizeSettings, name: str
) -> Calibration:
    """Return windows of `length` tokens, `prefix` included. Raises QuantizeError if there are too few ids."""
    own = length - len(prefix)
    num_held_out = min(len(ids) // HELD_OUT_SHARE, HELD_OUT_WINDOWS * own)
    rest, last = ids[: len(ids) - num_held_out], ids[len(ids) - num_held_out :]
    if len(rest) < own or num_held_out < 2:
        raise QuantizeError(
            f"{name} has {len(ids)} tokens, too few for a window of {length} besides the held-out windows: "
            "use a longer text, or a smaller --seqlen"
        )
    draw = random.Random(settings.seed)  # noqa: S311
    begins = [draw.randrange(len(rest) - own + 1) for _ in range(settings.samples)]
    ends = [last[i : i + own] for i in range(0, len(last), own)]
    return Calibration(
        [prefix + rest[begin : begin + own] for begin in begins],
        [prefix + end for end in ends if len(end) > 1],
    )


def _tokenize(directory: Path, text: str) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer prepends to every text, and the ids of this text."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise QuantizeError(f"{directory} has no tokenizer.json: run convert-to-fast-tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain exceptions
        raise QuantizeError(f"{path} cannot be read: {first_line(error)}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer.encode("").ids, tokenizer.encode(text, add_special_tokens=False).ids


def _read_text(file: Path) -> str:
    """Return the text of a file. Texts of .jsonl lines are separated by blank lines."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise QuantizeError(f"--calibration: {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise QuantizeError(f"--calibration: {file} is not text in UTF-8") from error
    if file.suffix != ".jsonl":
        return text
    lines = [line for line in enumerate(text.split("\n"), 1) if line[1].strip()]
    return "\n\n".join(_read_line(file, number, line) for number, line in lines)


def _read_line(file: Path, number: int, line: str) -> str:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise QuantizeError(f"--calibration: {file}, line {number} is not valid JSON") from error
    text = content.get("text") if isinstance(content, dict) else None
    if not isinstance(text, str):
        raise QuantizeError(f'--calibration: {file}, line {number} is not an object with a "text"')
    return text


def _read_wikitext(cache: Path) -> str:
    snapshots = [find_snapshot(cache / name, None) for name in DATASETS]
    files = [file for one in snapshots for file in sorted(glob.glob(str(one / WIKITEXT)))]
    if not files:
        raise QuantizeError(
            "--calibration FILE is needed: the default text, wikitext-2, is not in the hub's cache"
        )
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise QuantizeError(
            "--calibration FILE is needed: reading wikitext-2 from the hub's cache requires pyarrow"
        ) from error
    return "\n\n".join(text for file in files for text in parquet.read_table(file)["text"].to_pylist())
