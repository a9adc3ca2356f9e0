"""`docs/pictures/speed.svg`: the service beside llama.cpp, drawn from the table of `docs/performance.md`."""

import re
from html import escape
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance.md"
MODEL = "SmolLM2-135M-Instruct"
SECTION = "## A real model beside llama.cpp"
ROW = re.compile(r"^\| (.+) \|$", re.MULTILINE)

LABELS, BAR, GAP, TOP, MARGIN = 170, 18, 16, 64, 20  # widths and heights in pixels
UNIT = 190  # of the speed of llama.cpp
STYLE = """
rect.page { fill: #f7f8fa } text { fill: #1f2933; font: 13px system-ui, sans-serif }
.head { font-weight: 600 } .first { fill: #9fb3e6 } .second { fill: #5b7bd5 }
line { stroke: #52606d; stroke-width: 1.5; stroke-dasharray: 5 4 }
@media (prefers-color-scheme: dark) {
  rect.page { fill: #262a33 } text { fill: #eef1f5 } line { stroke: #aab4c0 }
}
""".strip()


def read_table(text: str) -> tuple[list[str], dict[str, list[float]]]:
    """Return the cases, and the ratios of each row of the model by the text after the model's name."""
    section = text.split(SECTION)[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in row.split(" | ")] for row in ROW.findall(section)]
    named = [row for row in rows if row[0].startswith(f"{MODEL}, ")]
    series = {
        row[0].removeprefix(f"{MODEL}, ").replace("`", ""): [float(one) for one in row[1:]] for row in named
    }
    return rows[0][1:], series


def render() -> str:
    cases, series = read_table(PAGE.read_text())
    height = TOP + len(cases) * (len(series) * BAR + GAP) + 2 * MARGIN
    width = LABELS + UNIT * max(map(max, series.values())) + 3 * MARGIN
    x = LABELS + UNIT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img">',
        f"<title>{MODEL}: times as fast as llama.cpp</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{width:.0f}" height="{height}" rx="8"/>',
        f'<text class="head" x="{MARGIN}" y="24">{MODEL}: times as fast as llama.cpp</text>',
        *_legend(list(series)),
        *(part for i, case in enumerate(cases) for part in _case(i, case, series)),
        f'<line x1="{x}" x2="{x}" y1="{TOP - 8}" y2="{height - 2 * MARGIN}"/>',
        f'<text x="{x}" y="{height - MARGIN}" text-anchor="middle">llama.cpp = 1</text>',
        "</svg>\n",
    ]
    return "\n".join(parts)


def _legend(names: list[str]) -> list[str]:
    parts, x = [], MARGIN
    for kind, name in zip(("first", "second"), names, strict=True):
        parts.append(f'<rect class="{kind}" x="{x}" y="35" width="12" height="12"/>')
        parts.append(f'<text x="{x + 18}" y="46">{escape(name)}</text>')
        x += 40 + 7 * len(name)
    return parts


def _case(number: int, case: str, series: dict[str, list[float]]) -> list[str]:
    y = TOP + number * (len(series) * BAR + GAP)
    parts = [f'<text x="{MARGIN}" y="{y + BAR + 4}">{escape(case)}</text>']
    for i, (kind, ratios) in enumerate(zip(("first", "second"), series.values(), strict=True)):
        top, length = y + i * BAR, UNIT * ratios[number]
        parts.append(f'<rect class="{kind}" x="{LABELS}" y="{top}" width="{length:.0f}" height="{BAR - 3}"/>')
        parts.append(f'<text x="{LABELS + length + 6:.0f}" y="{top + 12}">{ratios[number]:.2f}</text>')
    return parts
