"""Renders a page in Chromium to a PNG, with 128 colours if pngquant is installed."""

import shutil
import subprocess
import tempfile
from pathlib import Path

LIGHT, DARK = "1", "0"  # colour schemes that the browser reports as preferred
NAMES = ("chromium", "chromium-browser", "google-chrome")


def screenshot(
    url: str, picture: Path, width: int, height: int, wait_ms: int = 1000, scheme: str = LIGHT
) -> None:
    """Render a window of the given size; scripts of the page get `wait_ms`, which must not be 0."""
    chromium = next((path for name in NAMES if (path := shutil.which(name))), None)
    if chromium is None:
        raise SystemExit("no chromium here: apt-get install chromium")
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                chromium,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                "--disable-background-networking",
                "--disable-component-update",
                f"--user-data-dir={profile}",
                f"--blink-settings=preferredColorScheme={scheme}",
                f"--window-size={width},{height}",
                f"--virtual-time-budget={wait_ms}",
                f"--screenshot={picture}",
                url,
            ],
            check=True,
            capture_output=True,
            timeout=60,
        )
    if pngquant := shutil.which("pngquant"):
        subprocess.run([pngquant, "--force", "--ext", ".png", "128", picture], check=True)


def screenshot_html(html: str, picture: Path, width: int, height: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        page = Path(directory) / "page.html"
        page.write_text(html)
        screenshot(page.as_uri(), picture, width, height)
