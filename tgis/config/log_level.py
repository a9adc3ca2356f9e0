"""Parses `LOG_LEVEL`: a level, or a filter as in TGIS, such as `info,text_generation_router=debug`."""

LEVELS = ("debug", "info", "warning", "error")
NAMES = {level: level for level in LEVELS} | {"trace": "debug", "warn": "warning", "off": "error"}
EXACT = {*LEVELS, "warn"}


def parse(text: str) -> tuple[str, str | None]:
    """Return the nearest level of LEVELS, and a notice if `text` is not exactly that. Raises ValueError.

    A level without a target takes precedence; if there is none, the most verbose level is returned."""
    general: list[str] = []
    targeted: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        _, equals, level = part.rpartition("=")
        (targeted if equals else general).append(_known(level))
    if not general and not targeted:
        raise ValueError(f"{text!r} has no level")
    level = NAMES[general[-1]] if general else min((NAMES[one] for one in targeted), key=LEVELS.index)
    is_exact = not targeted and general[-1] in EXACT
    return level, None if is_exact else f"log level {text!r} is read as {level}, for the whole service"


def _known(level: str) -> str:
    name = level.strip().lower()
    if name not in NAMES:
        raise ValueError(f"{level!r} is not a level; use one of {', '.join(LEVELS)}")
    return name
