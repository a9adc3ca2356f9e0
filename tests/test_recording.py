"""The picture of a killed shard: what it shows, when, and that the committed one is whole and small."""

import re
from pathlib import Path
from xml.etree import ElementTree

from scripts.screenshots.recovery_picture import HOLD_S, LEAD_S, MAX_PAUSE_S, draw_recovery
from scripts.screenshots.recovery_recording import Output, Recording

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "recovery.svg"
MAX_BYTES = 500_000
SVG = "{http://www.w3.org/2000/svg}"
RECORDING = Recording(
    answer=[Output(3.0, "Luna & "), Output(4.0, "her"), Output(4.2, " cat"), Output(24.2, " slept.\nThen")],
    log=[
        Output(4.3, "2026-01-31T12:00:00.123Z ERROR tgis.launcher.shard_group: shard 0 was killed"),
        Output(9.0, "Shard 0: 2026-01-31T12:00:05.000Z INFO tgis.shard.startup.load: loaded"),
        Output(24.0, "2026-01-31T12:00:20.000Z INFO tgis.router.engine.engine: the shards are back"),
    ],
    killed_at_s=4.1,
    killed_pid=77,
)


def read(picture: Path) -> dict[str, str]:
    """Return the classes of each text."""
    root = ElementTree.parse(picture).getroot()  # noqa: S314
    return {each.text or "": each.get("class", "") for each in root.iter(f"{SVG}text")}


def test_texts_appear_in_their_order_and_a_long_pause_is_shorter(tmp_path: Path) -> None:
    draw_recovery(RECORDING, tmp_path / "picture.svg")
    texts, svg = read(tmp_path / "picture.svg"), (tmp_path / "picture.svg").read_text()
    frames = re.findall(r"@keyframes (t\d+) \{ 0%, ([\d.]+)%", svg)
    [seconds] = {float(one) for one in re.findall(r"animation: t\d+ ([\d.]+)s", svg)}
    at = {name: float(share) / 100 * seconds for name, share in frames}

    def shown_at(text: str) -> float:
        return at[texts[text].split()[-1]]

    assert shown_at("Luna") == shown_at("&") < shown_at("cat") < shown_at("slept.") == shown_at("Then")
    assert abs(shown_at("Luna") - LEAD_S) < 0.01
    assert abs(shown_at("slept.") - shown_at("cat") - MAX_PAUSE_S) < 0.01
    assert abs(seconds - shown_at("slept.") - HOLD_S) < 0.01
    assert [word for word in ("cat", "slept.") if "after" in texts[word]] == ["slept."]


def test_the_log_has_the_launcher_and_the_engine_only(tmp_path: Path) -> None:
    draw_recovery(RECORDING, tmp_path / "picture.svg")
    texts = read(tmp_path / "picture.svg")
    assert {
        "ERROR shard 0 was killed",
        "INFO the shards are back",
        "$ kill -9 77  # the shard",
    } <= texts.keys()
    assert not [text for text in texts if "loaded" in text]
    assert "# pause of 20.0 s, shown in less; the answer equals that of a run without the kill" in texts


def test_the_committed_picture_is_whole_and_small() -> None:
    assert PICTURE.stat().st_size < MAX_BYTES
    texts = read(PICTURE)
    assert [text for text in texts if text.startswith("$ kill -9 ")]
    assert [text for text in texts if text.startswith("# pause of ")]
