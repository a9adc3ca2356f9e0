"""The site of docs/ builds in strict mode, its links have targets, and its pages load nothing from other
hosts."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from integration_tests.deployment.built_site import Site

ROOT = Path(__file__).resolve().parents[2]
# Beside the tests' environment, as made by the Makefile.
MKDOCS = Path(sys.prefix.removesuffix("-deploy") + "-docs") / "bin" / "mkdocs"

pytestmark = pytest.mark.deploy


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    assert MKDOCS.is_file(), "`make site` installs it"
    arguments = ["build", "-f", str(source / "mkdocs.yml"), "-d", str(target)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run([MKDOCS, *arguments], env=env, capture_output=True, text=True, check=False)


def copy(to: Path) -> Path:
    shutil.copytree(ROOT / "docs", to / "docs")
    shutil.copy(ROOT / "mkdocs.yml", to)
    return to


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    target = tmp_path_factory.mktemp("site")
    result = build(ROOT, target)
    assert result.returncode == 0, result.stderr
    return Site(target.resolve())


def test_every_page_is_there(site: Site) -> None:
    sources = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    assert {path.relative_to(site.root).with_suffix("") for path in site.pages} == sources | {Path("404")}


def test_links_and_anchors_lead_somewhere(site: Site) -> None:
    assert not site.broken()


def test_nothing_is_loaded_from_another_host(site: Site) -> None:
    assert not site.loaded_from_elsewhere()


def test_it_can_be_searched(site: Site) -> None:
    index = json.loads((site.root / "search" / "search_index.json").read_text())
    locations = {
        doc["location"].partition("#")[0] for doc in index["docs"] if "Model is overloaded" in doc["text"]
    }
    assert "troubleshooting.html" in locations


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[x](nowhere.md)", "'nowhere.md'"),
        ("[x](tls.md#nowhere)", "does not contain an anchor '#nowhere'"),
        ("[x](/tls.html)", "absolute link"),
    ],
)
def test_a_broken_link_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    source = copy(tmp_path)
    page = source / "docs" / "index.md"
    page.write_text(page.read_text() + f"\n{text}\n")
    result = build(source, tmp_path / "site")
    assert result.returncode == 1
    assert complaint in result.stderr


def test_a_page_outside_of_the_navigation_is_refused(tmp_path: Path) -> None:
    source = copy(tmp_path)
    (source / "docs" / "lost.md").write_text("# Lost\n")
    result = build(source, tmp_path / "site")
    assert (result.returncode, "lost.md" in result.stderr) == (1, True)


def test_foreign_resources_and_broken_links_are_reported(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        '<a href="a.html#b"></a><a href="#c"></a><a href="https://example.com"></a><p id="d"></p>'
        '<script src="//cdn.example/x.js"></script><img src="p.png"><link rel="preconnect" href="https://f.example">'
    )
    (tmp_path / "style.css").write_text("@import 'https://f.example/font.css'; b { background: url(x.png) }")
    site = Site(tmp_path)
    assert site.broken() == ["index.html: a.html#b", "index.html: #c", "index.html: p.png"]
    assert site.loaded_from_elsewhere() == [
        "index.html: //cdn.example/x.js",
        "index.html: https://f.example",
        "style.css: https://f.example/font.css",
    ]
