"""Windows of a text: random ones, separate from held-out ones; and refused texts."""

import json
from pathlib import Path

import pytest

from tests.support.shard.calibration_text import BOS, draw_ids, write_text, write_tokenizer
from tgis.shard.quantize.calibration import Calibration, read_calibration
from tgis.shard.quantize.settings import QuantizeError, QuantizeSettings

SMALL = QuantizeSettings(samples=50, seqlen=16)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 64}))
    write_tokenizer(directory)
    return directory


def read(model: Path, file: Path | None, settings: QuantizeSettings = SMALL) -> Calibration:
    return read_calibration(model, file, model / "hub", settings)


def refusal(model: Path, file: Path | None, settings: QuantizeSettings = SMALL) -> str:
    with pytest.raises(QuantizeError) as caught:
        read(model, file, settings)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_windows_are_of_the_text_and_apart_from_its_end(model: Path, tmp_path: Path) -> None:
    ids = draw_ids(1000)
    calibration = read(model, write_text(tmp_path / "text", ids))
    runs = {tuple(ids[i : i + 15]): i for i in range(len(ids) - 14)}
    assert [window[0] for window in calibration.samples] == [BOS] * 50
    begins = [runs[tuple(window[1:])] for window in calibration.samples]
    assert len(set(begins)) > 40
    assert max(begins) + 15 <= 900
    assert max(begins) > 800
    assert [len(window) for window in calibration.held_out] == [16] * 6 + [11]
    assert [i for window in calibration.held_out for i in window[1:]] == ids[900:]


def test_the_seed_decides(model: Path, tmp_path: Path) -> None:
    file = write_text(tmp_path / "text", draw_ids(1000))
    first, again, other = (read(model, file, QuantizeSettings(seqlen=16, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first.digest == again.digest
    assert first.samples != other.samples
    assert first.digest != other.digest
    assert first.held_out == other.held_out


def test_windows_fit_the_model_s_length(model: Path, tmp_path: Path) -> None:
    calibration = read(model, write_text(tmp_path / "text", draw_ids(20_000)), QuantizeSettings())
    assert {len(window) for window in calibration.samples} == {64}
    assert len(calibration.samples) == 128
    assert len(calibration.held_out) == 16


def test_lines_of_json(model: Path, tmp_path: Path) -> None:
    ids, file = draw_ids(1000), tmp_path / "text.jsonl"
    parts = [ids[i : i + 10] for i in range(0, 1000, 10)]
    lines = [json.dumps({"text": " ".join(f"w{i}" for i in part), "more": 1}) for part in parts]
    file.write_text("\n\n".join(lines) + "\n")
    assert read(model, file) == read(model, write_text(tmp_path / "text", ids))


def test_texts_that_cannot_be_used(model: Path, tmp_path: Path) -> None:
    missing, short, other = tmp_path / "missing", tmp_path / "short", tmp_path / "other.jsonl"
    assert refusal(model, missing) == f"--calibration: {missing} cannot be read: No such file or directory"
    text = "use a longer text, or a smaller --seqlen"
    assert refusal(model, write_text(short, draw_ids(16))) == (
        f"{short} has 16 tokens, too few for a window of 16 besides the held-out windows: {text}"
    )
    assert refusal(model, write_text(short, [])).startswith(f"{short} has 0 tokens, too few for")
    short.write_bytes(b"\xff\xfe")
    assert refusal(model, short) == f"--calibration: {short} is not text in UTF-8"
    other.write_text('{"text": "w1"}\n{"text"')
    assert refusal(model, other) == f"--calibration: {other}, line 2 is not valid JSON"
    for line in ("[]", '{"text": 1}', "{}"):
        other.write_text(line)
        assert refusal(model, other) == f'--calibration: {other}, line 1 is not an object with a "text"'


def test_without_a_text(model: Path) -> None:
    assert refusal(model, None) == (
        "--calibration FILE is needed: the default text, wikitext-2, is not in the hub's cache"
    )


def test_without_a_tokenizer(model: Path, tmp_path: Path) -> None:
    file = write_text(tmp_path / "text", draw_ids(1000))
    (model / "tokenizer.json").write_text("{")
    assert refusal(model, file).startswith(f"{model / 'tokenizer.json'} cannot be read: ")
    (model / "tokenizer.json").unlink()
    assert refusal(model, file) == f"{model} has no tokenizer.json: run convert-to-fast-tokenizer"
