"""Figures from records of answers."""

from dataclasses import replace

import pytest

from tgis.load.errors import LoadError
from tgis.load.figures import (
    SEED_FAULT,
    find_seed_faults,
    is_good,
    parse_objectives,
    summarize_level,
    window_of,
)
from tgis.load.processes import RunRecord
from tgis.load.records import AnswerReceiver, AnswerRecord

OBJECTIVES = {"ttft": 0.5, "itl": 0.1}


def answer(
    begin: float, arrivals: list[float], counts: list[int] | None = None, **more: object
) -> AnswerRecord:
    counts = counts or [*range(1, len(arrivals) + 1)]
    record = AnswerRecord(
        0, 0, begin, begin, counts[-1], arrivals, counts, ended=arrivals[-1], input_tokens=10
    )
    return replace(record, **more)  # type: ignore[arg-type]


def run(*records: AnswerRecord, elapsed_s: float = 2.0, cpu: float = 0.1, delay: float = 0.0) -> RunRecord:
    return RunRecord([*records], [cpu], [delay], elapsed_s)


def test_latencies_count_from_the_intended_time() -> None:
    late = answer(1.0, [1.6, 1.7, 1.8], sent=1.5)
    assert late.first_token_s == pytest.approx(0.6)
    assert late.total_s == pytest.approx(0.8)
    assert late.token_s == pytest.approx(0.1)


def test_messages_of_several_tokens() -> None:
    assert answer(0.0, [1.0, 2.0], [3, 13]).token_s == pytest.approx(0.1)
    assert answer(0.0, [1.0], [5]).token_s is None


def test_rates_count_what_falls_into_the_window() -> None:
    records = [
        answer(0.0, [0.2, 0.4, 1.0]),
        answer(0.0, [0.2, 0.4, 2.5]),
        answer(0.0, [0.1], error="timeout"),
    ]
    figures = summarize_level([run(*records, elapsed_s=3.0)], 2.0, {})
    assert figures["requests_per_s"] == 0.5
    assert figures["output_tokens_per_s"] == (3 + 2 + 1) / 2.0
    assert figures["input_tokens_per_s"] == 5
    assert (figures["requests"], figures["succeeded"], figures["errors"]) == (3, 2, {"timeout": 1})
    assert figures["total"]["max"] == 2.5, "latencies are those of all answers"
    assert window_of(run(*records), None) == 2.5


def test_goodput_counts_requests_that_meet_every_objective() -> None:
    good, slow_start, slow_tokens = (
        answer(0.0, [0.4, 0.45]),
        answer(0.0, [0.6, 0.65]),
        answer(0.0, [0.4, 0.9]),
    )
    assert [is_good(one, OBJECTIVES) for one in (good, slow_start, slow_tokens)] == [True, False, False]
    assert is_good(answer(0.0, [0.4]), OBJECTIVES), "one token has no time between tokens"
    assert not is_good(replace(good, error="timeout"), OBJECTIVES)
    figures = summarize_level([run(good, slow_start, slow_tokens)], 2.0, OBJECTIVES)
    assert (figures["goodput_per_s"], figures["good_share"]) == (0.5, pytest.approx(1 / 3))


def test_objectives_are_read() -> None:
    assert parse_objectives("ttft=0.5,itl=0.05") == {"ttft": 0.5, "itl": 0.05}
    for text in ("ttft", "ttft=x", "speed=1"):
        with pytest.raises(LoadError):
            parse_objectives(text)


def test_cached_tokens_are_a_share_of_the_inputs_of_services_that_report_them() -> None:
    known, unknown = answer(0.0, [1.0], cached_tokens=4), answer(0.0, [1.0])
    figures = summarize_level([run(known, unknown)], None, {})
    assert (figures["cached_tokens"], figures["cached_share"]) == (4, 0.4)
    assert summarize_level([run(unknown)], None, {})["cached_share"] is None


def test_repeated_seeds_must_give_the_same_text() -> None:
    def record(index: int, digest: str, repeats: int | None = None) -> AnswerRecord:
        return answer(0.0, [1.0], index=index, digest=digest, repeats=repeats)

    same = [record(0, "a"), record(1, "a", 0)]
    other = [record(2, "b"), record(3, "c", 2), record(9, "d", 8)]
    assert find_seed_faults([*same, *other]) == [other[1]]
    more = [record(5, "a", 0), record(7, "c", 0), record(11, "e", 8)]
    assert find_seed_faults([*same, *other, *more]) == [other[1], more[1], more[2]]
    lost = [replace(one, error="timeout") for one in more]
    assert find_seed_faults([*same, *lost]) == []
    assert summarize_level([run(*same, *other)], None, {})["faults"] == {SEED_FAULT: 1}


def test_repeats_have_intervals() -> None:
    runs = [run(*[answer(0.0, [1.0])] * count) for count in (10, 12, 14)]
    figures = summarize_level(runs, 1.0, {})
    low, high = figures["intervals"]["requests_per_s"]
    assert low < 10 < figures["requests_per_s"] == 12 < 14 < high
    assert summarize_level(runs[:1], 1.0, {})["intervals"]["requests_per_s"] is None


@pytest.mark.parametrize(
    ("busy", "why"),
    [
        (run(answer(0.0, [1.0])), None),
        (run(answer(0.0, [1.0]), cpu=0.95), "95% of a core"),
        (run(answer(0.0, [1.0], sent=0.3)), "sent more than 300 ms late"),
        (run(answer(0.0, [1.0]), delay=0.05), "read more than 50 ms late"),
    ],
)
def test_a_generator_that_is_the_bottleneck_is_reported(busy: RunRecord, why: str | None) -> None:
    reason = summarize_level([busy], None, {})["generator"]["bottleneck"]
    assert reason is None if why is None else why in reason


def test_a_service_without_counts_is_corrected_at_the_end() -> None:
    record = AnswerRecord(0, 0, 0.0, 0.0, 12)
    receiver = AnswerReceiver(record, iter([1.0, 2.0, 3.0]).__next__)
    for _ in range(3):
        receiver.add_tokens(1)
    receiver.correct_tokens(12)
    assert record.counts == [4, 8, 12]
    silent = AnswerRecord(0, 0, 0.0, 0.0, 12)
    AnswerReceiver(silent, lambda: 5.0).correct_tokens(12)
    assert (silent.arrivals, silent.counts) == ([5.0], [12])
