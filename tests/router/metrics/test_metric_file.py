"""Check metric files: recovery from damage, growth, and exclusive writing."""

import logging
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping
from itertools import count
from pathlib import Path

import pytest

from tgis.router.errors import StartupError
from tgis.router.metrics import metric_file
from tgis.router.metrics.metric_file import SEGMENT, SUFFIX, MetricFile, read_records
from tgis.router.metrics.metric_types import Counter, Histogram
from tgis.router.metrics.storage import Labels, SeriesKey, SummedStorage

KEY = SeriesKey("series", "kind", 3)
ODD = ("", "a", 'say "no"', "back\\slash", "line\nend", "\0", "é漢🙂", "\ud800", "x" * 5000)
Contents = dict[tuple[SeriesKey, Labels], list[float]]


def contents(directory: Path) -> Contents:
    """Return the records of the only file, as a reader sees them."""
    [records] = read_records(directory)
    return {
        (key, labels): cells.tolist() for key, of_key in records.items() for labels, cells in of_key.items()
    }


def fill(file: MetricFile, keys: Mapping[tuple[SeriesKey, Labels], list[float]]) -> None:
    for (key, labels), numbers in keys.items():
        cells = file.allocate(key, labels)
        for place, number in enumerate(numbers):
            cells[place] = number


def random_contents(r: random.Random, num_records: int) -> Contents:
    results: Contents = {}
    for number in range(num_records):
        key = SeriesKey(f"series {number % 7}", r.choice(ODD), r.choice((1, 2, 37)))
        labels = (*r.choices(ODD, k=r.randrange(4)), str(number))
        results[key, labels] = [r.random() for _ in range(key.num_cells)]
    return results


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    expected = random_contents(random.Random(1), 60)
    fill(MetricFile(tmp_path / f"a{SUFFIX}"), expected)
    assert contents(tmp_path) == expected


def test_the_next_process_continues(tmp_path: Path) -> None:
    path, expected = tmp_path / f"a{SUFFIX}", random_contents(random.Random(2), 30)
    first = MetricFile(path)
    assert not first.is_reopened
    fill(first, expected)
    first.close()
    second = MetricFile(path)
    assert second.is_reopened
    for key, labels in expected:
        assert second.allocate(key, labels).tolist() == expected[key, labels]
        assert labels in second.labels(key)
    fill(second, {(KEY, ("new",)): [1.0, 2.0, 3.0]})
    assert contents(tmp_path) == expected | {(KEY, ("new",)): [1.0, 2.0, 3.0]}


@pytest.mark.parametrize("num_cells", [2, 40, SEGMENT // 4])
def test_it_grows(tmp_path: Path, num_cells: int) -> None:
    """Check growth over several segments, with records larger than one; earlier cells stay in use."""
    path, r = tmp_path / f"a{SUFFIX}", random.Random(3)
    file, kept = MetricFile(path), {}
    for number in count():
        labels = (str(number), r.choice(ODD))
        kept[labels] = file.allocate(SeriesKey("series", "kind", num_cells), labels)
        kept[labels][-1] = number
        if path.stat().st_size > 4 * SEGMENT:
            break
    for number, cells in enumerate(kept.values()):
        cells[0] = number + 0.5
    result = contents(tmp_path)
    assert len(result) == len(kept)
    for number, labels in enumerate(kept):
        cells = result[SeriesKey("series", "kind", num_cells), labels]
        assert (cells[0], cells[-1]) == (number + 0.5, number)
        assert not any(cells[1:-1])
    file.close()
    assert MetricFile(path).labels(SeriesKey("series", "kind", num_cells)) == list(kept)


def test_a_file_that_ends_anywhere(tmp_path: Path) -> None:
    """Check that a reader and the next process read exactly the complete records before the cut."""
    path, expected = tmp_path / "whole" / f"a{SUFFIX}", {}
    file, ends = MetricFile(path), [metric_file.HEADER.size]
    for number in range(3):
        expected[KEY, (str(number), "é")] = [number + 0.1] * 3
        fill(file, expected)
        ends.append(file._end)
    whole, cut = path.read_bytes(), tmp_path / "cut" / f"a{SUFFIX}"
    cut.parent.mkdir()
    for size in range(metric_file.HEADER.size, ends[-1] + 1):
        cut.write_bytes(whole[:size])
        num_whole = sum(end <= size for end in ends) - 1
        left = dict([*expected.items()][:num_whole])
        assert contents(cut.parent) == left, size
        if size % 5 and size < ends[-1]:
            continue
        following = MetricFile(cut)
        fill(following, {(KEY, ("new",)): [7.0, 8.0, 9.0]})
        following.close()
        assert contents(cut.parent) == left | {(KEY, ("new",)): [7.0, 8.0, 9.0]}, size


def test_a_record_is_seen_only_when_the_length_covers_it(tmp_path: Path) -> None:
    """Check the incomplete record of a writer that died while writing it."""
    path = tmp_path / f"a{SUFFIX}"
    file = MetricFile(path)
    fill(file, {(KEY, ("a",)): [1.0, 1.0, 1.0]})
    end = file._end
    fill(file, {(KEY, ("b",)): [2.0, 2.0, 2.0]})
    file._length[0] = end
    file.close()
    assert contents(tmp_path) == {(KEY, ("a",)): [1.0, 1.0, 1.0]}
    following = MetricFile(path)
    assert following.allocate(KEY, ("b",)).tolist() == [0.0, 0.0, 0.0], "no rest of the dead one's numbers"


def test_any_wrong_byte_of_a_record_hides_it(tmp_path: Path) -> None:
    path = tmp_path / "whole" / f"a{SUFFIX}"
    file = MetricFile(path)
    fill(file, {(KEY, ("a",)): [1.0] * 3})
    begin = file._end
    fill(file, {(KEY, ("b",)): [2.0] * 3})
    whole, wrong = path.read_bytes(), tmp_path / "wrong" / f"a{SUFFIX}"
    wrong.parent.mkdir()
    for place in range(begin, begin + 16 + len('["series", "kind", "b"]')):
        changed = bytearray(whole)
        changed[place] ^= 0x41
        wrong.write_bytes(changed)
        if place not in range(begin + 12, begin + 16):
            assert list(contents(wrong.parent)) == [(KEY, ("a",))], place


@pytest.mark.parametrize("damaged", [b"", b"short", b"PNG" * 1000, bytes(SEGMENT)])
def test_a_file_without_metrics_is_replaced(
    tmp_path: Path, damaged: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / f"a{SUFFIX}"
    path.write_bytes(damaged)
    assert contents(tmp_path) == {}
    with caplog.at_level(logging.WARNING):
        file = MetricFile(path)
    assert "its counters begin at 0" in caplog.text
    fill(file, {(KEY, ()): [1.0, 2.0, 3.0]})
    assert contents(tmp_path) == {(KEY, ()): [1.0, 2.0, 3.0]}


def test_other_buckets_are_other_records(tmp_path: Path) -> None:
    """Check histograms with as many but different buckets: their values are neither continued nor added."""
    path = tmp_path / f"a{SUFFIX}"
    first = MetricFile(path)
    for bounds in ([1.0, 2.0, 3.0], [1.0, 2.0, 4.0], [1.0, 2.0]):
        Histogram("seconds", "", bounds, (), first).observe(3.5)
    first.close()
    [family] = Histogram("seconds", "", [1.0, 2.0, 4.0], (), SummedStorage(read_records(tmp_path))).collect()
    buckets = [sample.value for sample in family.samples if sample.name == "seconds_bucket"]
    assert buckets == [0, 0, 1, 1]
    again = Histogram("seconds", "", [1.0, 2.0, 4.0], (), MetricFile(path))
    again.observe(0.5)
    assert again.count == 2


def test_a_counter_continues_with_its_source(tmp_path: Path) -> None:
    path, seen = tmp_path / f"a{SUFFIX}", []
    for number in (5, 3, 0):
        file = MetricFile(path)
        counter = Counter("number", "", ("kind",), file)
        for _ in range(2):
            counter.follow(lambda number=number: number, "a")
            counter.publish()
        seen.append(counter.values()[("a",)])
        file.close()
    assert seen == [5, 8, 8]


def test_one_process_writes_a_file(tmp_path: Path) -> None:
    path = tmp_path / f"a{SUFFIX}"
    file = MetricFile(path)
    code = "import sys; from pathlib import Path; from tgis.router.metrics.metric_file import MetricFile"
    command = [sys.executable, "-c", f"{code}; MetricFile(Path(sys.argv[1]))", str(path)]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert f"StartupError: another process stores its metrics in {path}" in refused.stderr
    with pytest.raises(StartupError, match="another process"):
        MetricFile(path)
    file.close()
    assert subprocess.run(command, check=False).returncode == 0


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="metrics cannot be stored in"):
        MetricFile(tmp_path / "file" / f"a{SUFFIX}")


def test_a_full_disk_stops_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that values without space in the file count in the process alone, with one warning."""
    file = MetricFile(tmp_path / f"a{SUFFIX}")
    fill(file, {(KEY, ()): [1.0, 1.0, 1.0]})

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(metric_file.os, "posix_fallocate", refuse)
    large = SeriesKey("large", "", SEGMENT)
    with caplog.at_level(logging.WARNING):
        for name in "ab":
            file.allocate(large, (name,))[5] = 1.0
    assert caplog.text.count("No space left on device") == 1
    assert file.allocate(large, ("a",))[5] == 1.0
    assert contents(tmp_path) == {(KEY, ()): [1.0, 1.0, 1.0]}


def test_a_directory_that_disappears(tmp_path: Path) -> None:
    """Check that a reader accepts the removal of a service's files, and that the writer continues."""
    path = tmp_path / "gone" / f"a{SUFFIX}"
    file = MetricFile(path)
    shutil.rmtree(path.parent)
    assert read_records(path.parent) == []
    fill(file, {(KEY, ()): [1.0, 1.0, 1.0]})
