"""Writes the pages and files that are generated from the code. With --check, it fails if one of them would
change."""

import sys
from pathlib import Path
from typing import Protocol

from scripts import (
    configuration_page,
    dashboard,
    lmi_page,
    metrics_page,
    models_page,
    observability_page,
    prometheus_rule,
    speed_picture,
    tgi_page,
    troubleshooting_page,
    vllm_page,
    wire_page,
)
from scripts.accuracy_tables import PageWithTables

DOCS = Path(__file__).resolve().parent.parent / "docs"


class Page(Protocol):
    def render(self) -> str: ...


PAGES: dict[str, Page] = {
    "configuration.md": configuration_page,
    "metrics.md": metrics_page,
    "migrating/lmi.md": lmi_page,
    "migrating/tgi.md": tgi_page,
    "migrating/vllm.md": vllm_page,
    "models.md": models_page,
    "observability.md": observability_page,
    "performance.md": PageWithTables("performance.md"),
    "pictures/speed.svg": speed_picture,
    "quantized-checkpoints.md": PageWithTables("quantized-checkpoints.md"),
    "troubleshooting.md": troubleshooting_page,
    "tuning.md": PageWithTables("tuning.md"),
    "wire.md": wire_page,
    "../deployment/components/monitoring/prometheusrule.yaml": prometheus_rule,
    "../deployment/monitoring/dashboard.json": dashboard,
}


def main(check: bool) -> None:
    outdated = [name for name, page in PAGES.items() if _read(DOCS / name) != page.render()]
    if outdated and check:
        sys.exit(f"out of date: {', '.join(outdated)}; run `make docs`")
    for name in outdated:
        (DOCS / name).parent.mkdir(exist_ok=True)
        (DOCS / name).write_text(PAGES[name].render())


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


if __name__ == "__main__":
    main("--check" in sys.argv[1:])
