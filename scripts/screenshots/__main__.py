"""Creates docs/pictures: `dashboard` and `top` of a service under load for a minute and a half, `site` of the
pages that `make site` built, `recovery` of a stream whose shard is killed. All but the last need, beside the
development environment, Debian's chromium, tmux and pngquant, and `scripts/fetch_prometheus.sh`."""

import sys
import tempfile
from pathlib import Path

from bench.real_model import convert_real_model
from scripts.prometheus import ROOT, Prometheus
from scripts.screenshots.dashboard_picture import draw_dashboard
from scripts.screenshots.load import LOAD_S, Load, serve_model
from scripts.screenshots.recovery_picture import draw_recovery
from scripts.screenshots.recovery_recording import record
from scripts.screenshots.site_picture import draw_site
from scripts.screenshots.terminal_picture import draw_top

PICTURES = ROOT / "docs" / "pictures"
SITE = ROOT / "site"
MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct.gguf"
TOP_AFTER_S = 40.0  # when the load is highest


def main(kinds: list[str]) -> None:
    PICTURES.mkdir(exist_ok=True)
    if "dashboard" in kinds or "top" in kinds:
        with tempfile.TemporaryDirectory() as directory:
            _draw_service(Path(directory), kinds)
    if "recovery" in kinds:
        with tempfile.TemporaryDirectory() as directory:
            draw_recovery(record(MODEL, Path(directory)), PICTURES / "recovery.svg")
    if "site" in kinds:
        draw_site(SITE, PICTURES)


def _draw_service(directory: Path, kinds: list[str]) -> None:
    with serve_model(convert_real_model(), directory) as service:
        with Prometheus(directory / "prometheus", f"127.0.0.1:{service.http_port}") as prometheus:
            with Load(service) as load:
                load.wait_until(TOP_AFTER_S)
                if "top" in kinds:
                    draw_top(f"127.0.0.1:{service.http_port}", PICTURES / "top.png")
                if "dashboard" in kinds:
                    load.wait_until(LOAD_S)
            if "dashboard" in kinds:
                draw_dashboard(prometheus, load.began_at, PICTURES / "dashboard.png")


if __name__ == "__main__":
    main(sys.argv[1:] or ["dashboard", "top", "recovery", "site"])
