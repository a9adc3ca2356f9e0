"""Pages of the documentation's site as a browser shows them, from a server on loopback."""

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from scripts.screenshots.browser import screenshot

WIDTH, HEIGHT = 1280, 900
PAGES = {"site.png": "", "site-deployment.png": "deployment/"}  # picture: place below the site's root
SCRIPTS_MS = 3000


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def draw_site(site: Path, pictures: Path) -> None:
    """Of a built site; pages that it does not have are told of and left out."""
    if not (site / "index.html").is_file():
        raise SystemExit(f"{site} is not built: make site")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        for name, place in PAGES.items():
            if (site / place / "index.html").is_file():
                url = f"http://127.0.0.1:{server.server_port}/{place}"
                screenshot(url, pictures / name, WIDTH, HEIGHT, SCRIPTS_MS)
            else:
                print(f"{place} is no page of {site}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
