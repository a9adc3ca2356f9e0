"""Texts that appear one after the other on a terminal, as an SVG that repeats and needs no script. A viewer
without animations shows all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

CHAR_WIDTH, LINE_HEIGHT, MARGIN, TITLE_HEIGHT = 8.4, 19, 16, 30
STYLE = """
rect { fill: #1e1e2e } .bar { fill: #313244 }
text { font: 14px ui-monospace, "DejaVu Sans Mono", Menlo, monospace; white-space: pre; fill: #d8dee9 }
.command { fill: #88c0d0; font-weight: bold } .dim { fill: #8a93a6 } .after { fill: #a3be8c }
.bad { fill: #e06c75; font-weight: bold }
@media (prefers-reduced-motion: reduce) { text { animation: none !important } }
""".strip()


@dataclass(frozen=True)
class Piece:
    """Text in one line, shown from `at_s` on."""

    at_s: float
    line: int
    column: int
    text: str
    kind: str = ""
    """Class of the style sheet."""


def draw(pieces: Sequence[Piece], columns: int, lines: int, seconds: float, title: str) -> str:
    """Return the picture of one round of `seconds`."""
    width, height = round(columns * CHAR_WIDTH) + 2 * MARGIN, lines * LINE_HEIGHT + 2 * MARGIN + TITLE_HEIGHT
    shown = [each for each in pieces if each.text.strip()]
    times = sorted({each.at_s for each in shown if each.at_s > 0})
    frames = "\n".join(_frames(f"t{i}", at / seconds, seconds) for i, at in enumerate(times))
    texts = "\n".join(_text(each, times) for each in shown)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE}\n{frames}\n</style>\n"
        f'<rect width="{width}" height="{height}" rx="8"/>'
        f'<rect class="bar" width="{width}" height="{TITLE_HEIGHT - 6}" rx="8"/>\n{texts}\n</svg>\n'
    )


def _frames(name: str, share: float, seconds: float) -> str:
    hidden = f"{share * 100:.3f}%"
    shown = f"{min(share * 100 + 0.001, 100):.3f}%"
    return (
        f"@keyframes {name} {{ 0%, {hidden} {{ visibility: hidden }} "
        f"{shown}, 100% {{ visibility: visible }} }}"
        f" .{name} {{ animation: {name} {seconds:.2f}s infinite }}"
    )


def _text(piece: Piece, times: Sequence[float]) -> str:
    text = piece.text.lstrip(" ")
    column = piece.column + len(piece.text) - len(text)
    text = text.rstrip(" ")
    x, y = MARGIN + column * CHAR_WIDTH, MARGIN + TITLE_HEIGHT + (piece.line + 0.75) * LINE_HEIGHT
    kinds = " ".join(filter(None, [piece.kind, f"t{times.index(piece.at_s)}" if piece.at_s > 0 else ""]))
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" textLength="{len(text) * CHAR_WIDTH:.1f}" '
        f'lengthAdjust="spacingAndGlyphs" class="{kinds}">{escape(text)}</text>'
    )
