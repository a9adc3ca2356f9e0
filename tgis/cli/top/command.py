"""Defines the command `top`, which shows the metrics of a running service until it is interrupted."""

import contextlib
import sys
from dataclasses import dataclass

from tgis.cli.command import command as build_command
from tgis.cli.top.place import ServicePlace
from tgis.config.option import option


@dataclass(frozen=True, kw_only=True)
class View:
    interval: float = option("Time between two scrapes, in seconds.", 1.0, env=False, minimum=0.1)
    window: float = option(
        "Time over which rates and latencies are computed, in seconds.", 10.0, env=False, minimum=0.1
    )
    once: bool = option("Print one frame, from two scrapes, and exit.", False, env=False)


def top(place: ServicePlace, view: View) -> None:
    """Show frames if stdout is a terminal, else print them. Raises ScrapeError if --once fails."""
    # This import loads rich, which would slow down the start of every other command.
    from tgis.cli.top import screen

    if view.once:
        screen.print_once(place, view.interval, view.window)
        return
    with contextlib.suppress(KeyboardInterrupt):
        show = screen.show_frames if sys.stdout.isatty() else screen.print_frames
        show(place, view.interval, view.window)


command = build_command("top", top, "Watch the metrics of a running service.", ServicePlace, View)
