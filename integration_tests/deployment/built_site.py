"""Reads the links and resources of a built site from its HTML and its style sheets."""

import re
from dataclasses import dataclass
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}
LOADING_LINKS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload"}
IN_STYLES = re.compile(r"""(?:url\(|@import\s+)["']?([^"')]+)""")


class Document(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.update(given[name] for name in ("id", "name") if name in given)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and LOADING_LINKS & set(given.get("rel", "").split()):
            self.loads.append(given["href"])
        if tag in LOADED and LOADED[tag] in given:
            self.loads.append(given[LOADED[tag]])


@dataclass(frozen=True)
class Site:
    root: Path

    @cached_property
    def pages(self) -> dict[Path, Document]:
        return {path: Document(path.read_text()) for path in sorted(self.root.rglob("*.html"))}

    def broken(self) -> list[str]:
        """Return the links and resources within the site whose targets are missing."""
        return [
            f"{path.relative_to(self.root)}: {link}"
            for path, document in self.pages.items()
            for link in (*document.links, *document.loads)
            if not self._is_good(path, link)
        ]

    def loaded_from_elsewhere(self) -> list[str]:
        """Return the requests to other hosts that a browser would make for a page."""
        loads = {(path, one) for path, document in self.pages.items() for one in document.loads}
        for path in (*self.root.rglob("*.css"), *self.root.rglob("*.svg")):
            loads |= {(path, one) for one in IN_STYLES.findall(path.read_text())}
        return sorted(f"{path.relative_to(self.root)}: {one}" for path, one in loads if _is_elsewhere(one))

    def _is_good(self, path: Path, link: str) -> bool:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            return True
        base = self.root if parts.path.startswith("/") else path.parent
        target = (base / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
        if target.is_dir():
            target /= "index.html"
        anchor = unquote(parts.fragment)
        has_anchor = not anchor or target not in self.pages or anchor in self.pages[target].ids
        return target.is_file() and has_anchor


def _is_elsewhere(link: str) -> bool:
    parts = urlsplit(link)
    return bool(parts.netloc) or parts.scheme in ("http", "https")
