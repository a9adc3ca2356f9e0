"""Applies the options set by LMI's names, and reports the outcome of each name."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tgis.config import report
from tgis.config.aliases.alias import Alias
from tgis.config.checks import DEFAULT, Setting, SettingsError, apply_defaults
from tgis.config.option import declared, flag_of
from tgis.config.option_names import OptionNames
from tgis.config.processes import LauncherConfig
from tgis.process.gpus import count_gpus, has_gpus
from tgis.router.api.lmi.options.names import (
    DEFAULT_QUEUE,
    DEFAULTS,
    KEYS,
    MODEL_DIR,
    MODEL_ID,
    QUEUE,
    SIMPLE_NAMES,
    TENSOR_PARALLEL,
    describe_unknown,
    find_alias,
)
from tgis.router.api.lmi.options.sources import MODEL_FOLDER, SIMPLE, GivenProperty, find_file, read_sources
from tgis.router.api.lmi.options.values import to_count, to_truth

NAME = "lmi"
SOURCE = f"--compat {NAME}"
LAST = (MODEL_DIR, QUEUE)  # applied last, because they depend on other options
MAX_SHOWN_CHARS = 200
_SECRET = re.compile(r"(?<!per_)token$|secret|passw|credential|(api|access)_key|_key$", re.IGNORECASE)
_OWN_NAMES = {
    f.name: flag_of(f) if option.flag else f.name.upper() for f, option, _ in declared(LauncherConfig)
}
ReadValue = Callable[[str, str], Any]
"""Converts a text to the value of the service's option with a given name. Raises ValueError."""


class Verdict(Enum):
    """Outcome of a name: the level of its log line, and a word for the line."""

    USED = logging.INFO, "used"
    OVERRIDDEN = logging.INFO, "overridden"
    NO_EFFECT = logging.WARNING, "no effect"
    UNKNOWN = logging.WARNING, "unknown"
    REFUSED = logging.ERROR, "refused"


@dataclass(frozen=True)
class Outcome:
    given: GivenProperty
    verdict: Verdict
    text: str

    @property
    def line(self) -> str:
        line = f"{self.given.name}={self._value} ({self.given.origin}): {self.verdict.value[1]}{self.text}"
        return "".join(c if c.isprintable() else "?" for c in line)

    @property
    def _value(self) -> str:
        """Value for printing. The values of unknown names are hidden too, because they may be secret."""
        key = self.given.key
        is_known = key in KEYS and not _SECRET.search(key)
        return _shown(self.given.text) if is_known else report.HIDDEN


class LmiOutcomes(list[Outcome]):
    """Outcomes of all names that the operator set."""

    def describe(self) -> list[str]:
        """Return the lines of a report."""
        return ["properties:", *(f"  {one.line}" for one in self)] if self else []

    def to_notices(self, settings: Mapping[str, Setting]) -> list[tuple[int, str]]:
        """Return the lines to log, with their levels. Raises SettingsError for the first refused name."""
        for one in self:
            if one.verdict is Verdict.REFUSED:
                raise SettingsError(one.given.where + one.text)
        ours = [f"{name}={report.shown(one.value)}" for name, one in settings.items() if one.source == SOURCE]
        notices = [(one.verdict.value[0], one.line) for one in self]
        return [*notices, (logging.INFO, f"{SOURCE} sets what is not given: {' '.join(ours)}")]


class LmiPropertyReader:
    """Reader of serving.properties and of LMI's variables."""

    def forget_shared_names(self, settings: dict[str, Setting], defaults: Mapping[str, Any]) -> None:
        """Reset the options set by variables that LMI has too, because LMI's meaning applies to them."""
        for name, setting in settings.items():
            if setting.source in SIMPLE_NAMES:
                settings[name] = Setting(defaults[name])

    def apply(self, settings: dict[str, Setting], read: ReadValue) -> LmiOutcomes:
        """Set the options for LMI's names, and the options derived from them. Raises SettingsError and
        PropertiesError."""
        path = find_file(settings["properties"].value)
        outcomes = _Application(settings, read).apply(read_sources(path))
        queued = DEFAULT_QUEUE + settings["max_batch_size"].value
        apply_defaults({**DEFAULTS, "max_concurrent_requests": queued}, settings, SOURCE)
        if all(settings[name].source == DEFAULT for name in ("num_gpus", "sharded")):
            apply_defaults({"num_shard": _count_visible(settings)}, settings, SOURCE)
        for folder in (*([path.parent] if path else []), MODEL_FOLDER):
            if (folder / "config.json").is_file():
                apply_defaults({"model_name": str(folder)}, settings, SOURCE)
        return outcomes


class _Application:
    def __init__(self, settings: dict[str, Setting], read: ReadValue) -> None:
        self._settings = settings
        self._read = read
        self._first_by_key: dict[str, GivenProperty] = {}
        self._setter_by_option: dict[str, GivenProperty] = {}

    def apply(self, given: Iterable[GivenProperty]) -> LmiOutcomes:
        ordered = sorted(given, key=lambda one: one.key in LAST)
        return LmiOutcomes(Outcome(one, *self._decide(one)) for one in ordered)

    def _decide(self, one: GivenProperty) -> tuple[Verdict, str]:
        first = self._first_by_key.setdefault(one.key, one)
        if first is not one:
            return Verdict.OVERRIDDEN, f" by {first.where}"
        alias = find_alias(one.key)
        if alias is None:
            is_strict = self._settings["strict_config"].value
            return Verdict.REFUSED if is_strict else Verdict.UNKNOWN, f": {describe_unknown(one.key)}"
        if alias.means and (source := self._overriding_source(alias.means, one)):
            return Verdict.OVERRIDDEN, f" by {source}"
        try:
            return self._use(alias, one)
        except ValueError as error:
            return Verdict.REFUSED, f": {_shown(one.text)!r} cannot be used: {error}"

    def _use(self, alias: Alias, one: GivenProperty) -> tuple[Verdict, str]:
        """Set the option that the name stands for, if any. Raises ValueError."""
        is_off = alias.switch and not to_truth(one.text)
        if alias.refused and not is_off:
            return Verdict.REFUSED, f": {alias.why}"
        if refusal := alias.refusal_of and alias.refusal_of(one.text):
            raise ValueError(refusal.partition("is not supported: ")[2] or refusal)
        if alias.means is None:
            return Verdict.NO_EFFECT, f": {alias.why}"
        text = "" if is_off else self._convert(alias, one)
        note = f"; {alias.why}" if alias.why else ""
        flag = _OWN_NAMES[alias.means]
        if alias.convert_more is not None:
            for option, value_text in alias.convert_more(one.text).items():
                self._set(option, value_text, one)
        if not text:
            return Verdict.USED, f": {flag} is unchanged"
        value = self._set(alias.means, text, one)
        return Verdict.USED, f" as {flag}{'' if value is True else ' ' + report.shown(value)}{note}"

    def _convert(self, alias: Alias, one: GivenProperty) -> str:
        if one.key == TENSOR_PARALLEL and one.text.lower() in ("max", "-1"):
            return str(_count_visible(self._settings))
        if one.key == QUEUE:
            return str(to_count(one.text) + self._settings["max_batch_size"].value)
        return alias.convert(one.text) if alias.convert else one.text

    def _set(self, option: str, text: str, one: GivenProperty) -> Any:
        value = self._read(option, text)
        old = self._settings[option]
        if option in self._setter_by_option and value != old.value:
            raise ValueError(f"{old.source} sets {report.shown(old.value)}")
        self._setter_by_option.setdefault(option, one)
        self._settings[option] = Setting(value, self._setter_by_option[option].where)
        return value

    def _overriding_source(self, option: str, one: GivenProperty) -> str | None:
        """Return the source with a higher priority than `one` that already set the option, if any.
        Two names in one file, or two variables, have equal priority."""
        setting = self._settings[option]
        setter = self._setter_by_option.get(option)
        are_equal = setter and setter.rank == one.rank != SIMPLE and one.key not in LAST
        return None if setting.source == DEFAULT or are_equal else setting.source


def _count_visible(settings: Mapping[str, Setting]) -> int:
    """Return the number of visible GPUs, or 1 if no GPU is usable."""
    visible = settings["cuda_visible_devices"].value
    if settings["device"].value == "cpu" or not has_gpus(visible):
        return 1
    return count_gpus() if visible is None else len(visible.split(","))


def _shown(text: str) -> str:
    return report.shown(text)[:MAX_SHOWN_CHARS]


OPTIONS = OptionNames(NAME, "LMI", (), MODEL_ID, properties=LmiPropertyReader())
