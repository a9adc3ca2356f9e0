"""Defines the command `top`, which scrapes and draws until it is interrupted, even if the service is down."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

import click

from tgis.cli.command import command as build_command
from tgis.cli.top.rates import History
from tgis.cli.top.scrape import ScrapeError, Source, scrape
from tgis.cli.top.screen import NAME_WIDTH, draw, draw_failure
from tgis.config.option import option

# Terminal escapes: enter and leave the alternate screen and hide or show the cursor; move the cursor to the
# top; clear the rest of the line or of the screen.
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
HOME, REST_OF_LINE, REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


@dataclass(frozen=True, kw_only=True)
class View:
    interval: float = option("Seconds from one look to the next.", 1.0, env=False, minimum=0.1)
    window: float = option("Seconds that rates and latencies are taken over.", 10.0, env=False, minimum=0.1)
    once: bool = option("Print one frame, of two looks, and end.", False, env=False)


def top(source: Source, view: View) -> None:
    """Draw on the screen if stdout is a terminal; otherwise print one frame after another.

    Raises ClickException if --once finds no service."""
    if view.once:
        _print_once(source, view)
        return
    with contextlib.suppress(KeyboardInterrupt):
        (_watch_on_screen if sys.stdout.isatty() else _print_frames)(source, view)


def _print_once(source: Source, view: View) -> None:
    history = History(view.window)
    try:
        history.push(scrape(source))
        time.sleep(view.interval)
        last = scrape(source)
    except ScrapeError as error:
        raise click.ClickException(f"{source.target}: {error}") from error
    click.echo("\n".join(draw(source.target, _clock(), last, history.push(last))))


def _print_frames(source: Source, view: View) -> None:
    """Print every frame, and a failure only when it differs from the previous one."""
    told = ""
    for lines, failure in _frames(source, view):
        if not failure:
            click.echo("\n".join([*lines, ""]))
        elif failure != told:
            click.echo(f"{source.target}: {failure}; is asked again")
        told = failure


def _watch_on_screen(source: Source, view: View) -> None:
    with _screen():
        for lines, _ in _frames(source, view):
            width, height = os.get_terminal_size(sys.stdout.fileno())
            shown = [_emphasize(line[:width]) + REST_OF_LINE for line in lines[:height]]
            click.echo(HOME + "\r\n".join(shown) + REST_OF_SCREEN, nl=False, color=True)


def _frames(source: Source, view: View) -> Iterator[tuple[list[str], str]]:
    """Yield the lines to draw and the scrape's failure (empty if none), once per interval without end."""
    history = History(view.window)
    due = time.monotonic()
    while True:
        try:
            now = scrape(source)
            yield draw(source.target, _clock(), now, history.push(now)), ""
        except ScrapeError as error:
            history.forget()
            yield draw_failure(source.target, _clock(), str(error)), str(error)
        # A scrape that took longer than the interval delays the next ones; missed intervals are skipped.
        now_s = time.monotonic()
        due = max(due + view.interval, now_s)
        time.sleep(due - now_s)


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """Enter the alternate screen; leave it however the block ends, also on SIGTERM."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    click.echo(ENTER, nl=False, color=True)
    try:
        yield
    finally:
        click.echo(LEAVE, nl=False, color=True)
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _emphasize(line: str) -> str:
    if line.startswith(" "):
        return line
    name, rest = line[:NAME_WIDTH], line[NAME_WIDTH:]
    for bad in ("not ready", "no answer"):
        rest = rest.replace(bad, click.style(bad, fg="red", bold=True))
    return click.style(name, bold=True) + rest


def _clock() -> str:
    return time.strftime("%H:%M:%S")


command = build_command("top", top, "Watch a running service; reads its /metrics alone.", Source, View)
