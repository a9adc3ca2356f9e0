"""Renders `tgis top` as tmux shows it."""

import re
import subprocess
import sys
import time
from html import escape
from pathlib import Path

from scripts.screenshots.browser import screenshot_html

COLUMNS, LINES = 94, 18
WARM_UP_S = 12.0
SOCKET = "tgis-screenshots"  # a separate tmux server
CELL_WIDTH, CELL_HEIGHT, MARGIN = 8.43, 18, 16  # of the font below
STYLE = f"""
body {{ margin: 0; background: #1e1e2e; }}
pre {{ margin: {MARGIN}px; color: #d8dee9; font: 14px/{CELL_HEIGHT}px "DejaVu Sans Mono", monospace; }}
"""
SGR = re.compile(r"\x1b\[([0-9;]*)m")
STYLES = {"1": "font-weight:bold;color:#88c0d0", "31": "color:#bf616a"}


def draw_top(target: str, picture: Path) -> None:
    """Return the screen's content some seconds from now."""
    command = f"{sys.executable} -m tgis top --target {target}"
    size = ["-x", str(COLUMNS), "-y", str(LINES)]
    _tmux("-f", "/dev/null", "new-session", "-d", "-s", "top", *size, command)
    try:
        time.sleep(WARM_UP_S)
        screen = _tmux("capture-pane", "-e", "-p", "-t", "top")
    finally:
        _tmux("kill-server")
    width, height = round(COLUMNS * CELL_WIDTH) + 2 * MARGIN, LINES * CELL_HEIGHT + 2 * MARGIN
    screenshot_html(f"<style>{STYLE}</style><pre>{to_html(screen)}</pre>", picture, width, height)


def to_html(screen: str) -> str:
    """Render bold and red text as on a terminal."""
    parts, styles = [], ""
    for i, part in enumerate(SGR.split(screen)):
        if i % 2:
            codes = part.split(";")
            kept = "" if codes[0] in ("", "0") else styles
            styles = ";".join(filter(None, [kept, *(STYLES.get(code, "") for code in codes)]))
        else:
            parts.append(f'<span style="{styles}">{escape(part)}</span>' if styles else escape(part))
    return "".join(parts)


def _tmux(*arguments: str) -> str:
    done = subprocess.run(["tmux", "-L", SOCKET, *arguments], capture_output=True, text=True, check=True)  # noqa: S607
    return done.stdout
