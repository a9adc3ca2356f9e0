"""Defines the command line of `python -m bench`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench import shapes
from bench.clients import MODES
from bench.rates import SECTIONS as RATES
from bench.targets import TARGETS

# In the order of measurement. Peers are measured by a separate run, whose last figures are shown.
SECTIONS = (
    *("memory", *RATES, "clients"),
    *(
        "prefix",
        "long",
        "interruption",
        "engine-loss",
        "overload",
        "flood",
        "startup",
        "router",
        "speculation",
    ),
)


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measures the service.")
    parser.add_argument(
        "--shape", choices=list(shapes.SHAPES), default="135m", help="model (default %(default)s)"
    )
    parser.add_argument("--dtype", default="float16", help="type of the weights (default %(default)s)")
    parser.add_argument(
        "--only", type=_sections, metavar="NAMES", help=f"sections to run, among {','.join(SECTIONS)}"
    )
    parser.add_argument(
        "--rounds", "--repeat", type=int, default=5, help="measurements per figure (default %(default)s)"
    )
    parser.add_argument(
        "--clients", type=_counts, default=[1, 8, 32], help="numbers of clients (default 1,8,32)"
    )
    parser.add_argument("--input-tokens", type=int, default=128, help="(default %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="(default %(default)s)")
    table = parser.add_argument_group("the table of clients")
    table.add_argument(
        "--modes", type=_modes, default=["stream"], help="stream, unary or both (default stream)"
    )
    table.add_argument("--requests", type=int, default=2, help="requests per client (default %(default)s)")
    table.add_argument(
        "--time-limit",
        type=float,
        default=300.0,
        help="maximum seconds of one measurement (default %(default)s)",
    )
    table.add_argument("--attach", metavar="HOST:PORT", help="measure a running service, this table only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="JSON file for all figures")
    parser.add_argument(
        "--cache", type=Path, default=Path(".cache/bench"), help="directory of models (default %(default)s)"
    )
    parser.add_argument("launcher", nargs="*", help="further options of the launcher, after --")
    options = parser.parse_args(arguments)
    if options.attach:
        options.only = ["clients"]
    options.only = options.only or default_sections(options.shape)
    return options


def default_sections(shape: str) -> list[str]:
    """Return the sections that have a target for the shape, and those that are cheap for any shape."""
    pursued = {target.section for target in TARGETS if target.bound_of(shape) is not None}
    return [name for name in SECTIONS if name in pursued | {"memory"}]


def _sections(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := set(chosen) - set(SECTIONS):
        raise argparse.ArgumentTypeError(f"{min(unknown)} is none of {','.join(SECTIONS)}")
    return [name for name in SECTIONS if name in chosen]


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _modes(text: str) -> list[str]:
    chosen = text.split(",")
    if not set(chosen) <= set(MODES):
        raise argparse.ArgumentTypeError(f"of {','.join(MODES)}")
    return chosen
