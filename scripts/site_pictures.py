"""Pictures of the site for docs/pictures/, light and dark, taken by a headless Chromium (`chromium`, of any
distribution): python -m scripts.site_pictures SITE, where SITE is what `make site` has built."""

import functools
import http.server
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
SIZE = "1280,900"
SCHEMES = {"light": "1", "dark": "0"}  # of Chromium's setting
PAGES = {"light": "how-it-works.html", "dark": "troubleshooting.html"}


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def main(site: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("there is no chromium")
    with _served(site) as address:
        for scheme, page in PAGES.items():
            picture = PICTURES / f"site-{scheme}.png"
            flags = [
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--window-size={SIZE}",
            ]
            flags += [f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", f"--screenshot={picture}"]
            command = [browser, *flags, f"{address}/{page}"]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            print(picture)


@contextmanager
def _served(site: Path) -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "site"))
