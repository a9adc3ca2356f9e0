"""Texts to measure and to calibrate with, written by people: Python's documentation, which Debian has in
`libpython3-stdlib`, and Debian's common licences."""

from hashlib import sha256
from pathlib import Path

from bench.real_model import read_prose

WORDS = 300  # of a window; 20,000 tokens are 49 windows of SmolLM2's tokens
NUM_WINDOWS = 50  # the rest of the documentation is for calibration
LICENCES = Path("/usr/share/common-licenses")
# Models know licences by heart, so only calibration uses them.
LICENCE_NAMES = ("GPL-2", "LGPL-2.1", "MPL-2.0", "GFDL-1.3", "Apache-2.0", "Artistic", "CC0-1.0")


def read_windows() -> list[str]:
    """Return the texts whose tokens are measured, the same for every model."""
    return _split_prose()[:NUM_WINDOWS]


def digest(windows: list[str]) -> str:
    """Return a digest that differs between versions of the texts."""
    return sha256("\0".join(windows).encode()).hexdigest()[:16]


def read_calibration() -> str:
    """Return a text that has no window in common with those that are measured."""
    licences = [LICENCES / name for name in LICENCE_NAMES]
    texts = [" ".join(path.read_text().split()) for path in licences if path.is_file()]
    return "\n\n".join([*texts, *_split_prose()[NUM_WINDOWS:]])


def _split_prose() -> list[str]:
    words = "\n\n".join(read_prose()).split(" ")
    return [" ".join(words[i : i + WORDS]) for i in range(0, len(words) - WORDS + 1, WORDS)]
