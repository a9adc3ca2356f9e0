"""Renders pages of the documentation's site in a browser, light and dark, from a server on loopback."""

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from scripts.screenshots.browser import DARK, LIGHT, screenshot

WIDTH, HEIGHT = 1280, 900
PAGES = {"site-light.png": ("how-it-works.html", LIGHT), "site-dark.png": ("troubleshooting.html", DARK)}
SCRIPTS_MS = 3000


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def draw_site(site: Path, pictures: Path) -> None:
    """Serve a built site."""
    if not (site / "index.html").is_file():
        raise SystemExit(f"{site} is not built: make site")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        for name, (page, scheme) in PAGES.items():
            url = f"http://127.0.0.1:{server.server_port}/{page}"
            screenshot(url, pictures / name, WIDTH, HEIGHT, SCRIPTS_MS, scheme)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
