"""Check steps with drafts as columns and answers with token counts; invalid answers are refused."""

from typing import Any

import pytest

from tests.support.router.model_of_shard import column, integers
from tgis.pb import shard_pb2 as pb
from tgis.router.scheduling.step import NO_DRAFTS, Drafts, Step, WorkItem
from tgis.router.sequence import Details, Sequence, Stopping
from tgis.router.shards.codec import decode_answer, encode_step

DRAFTS = {4: Drafts([7, 8]), 2: NO_DRAFTS, 9: Drafts(max_proposed=3), 5: Drafts(max_proposed=1)}
DETAILS = Details(generated_tokens=True, ranks=True, top_n=1)


def make_step(drafts: dict[int, Drafts]) -> Step:
    sequences = [Sequence([1, 2, 3], Stopping(20), details=DETAILS) for _ in drafts]
    work = [
        WorkItem(sequence, row, 2, 3, samples=True, opens=False, new_blocks=[], drafts=each)
        for sequence, (row, each) in zip(sequences, drafts.items(), strict=True)
    ]
    num_drafts = sum(len(each.token_ids) for each in drafts.values())
    max_proposed = sum(each.max_proposed for each in drafts.values())
    return Step(6, work, len(work), num_drafts, max_proposed, 0, joins=False, closed_rows=[])


def response(**columns: Any) -> pb.StepResponse:
    """Build an answer in which row 4 accepts its draft, row 9 one of its own two, and row 5 none."""
    usual = {
        "rows": [2, 4, 9, 5],
        "num_tokens": [1, 2, 2, 1],
        "num_drafts": [0, 0, 2, 1],
        "token_ids": [10, 7, 11, 12, 13, 14],
        "ranks": [1, 2, 3, 4, 5, 6],
    } | columns
    ended = bytes(usual.pop("ended", [0, 0, 1, 0]))
    top = pb.TopTokens(counts=column([1] * 6), token_ids=column(range(20, 26)), logprobs=bytes(24))
    packed = {name: column(values) for name, values in usual.items()}
    return pb.StepResponse(step_id=6, ended=ended, top_tokens=top, **packed)


def test_the_step_has_ids_or_the_maximum_of_each_row() -> None:
    step = make_step(DRAFTS)
    message = encode_step(step)
    assert integers(message.num_drafts) == [2, 0, 0, 0]
    assert integers(message.draft_ids) == [7, 8]
    assert integers(message.max_drafts) == [0, 0, 3, 1]
    assert (step.num_tokens, step.num_drafts) == (10, 2)
    plain = encode_step(make_step({4: NO_DRAFTS}))
    assert plain.num_drafts == plain.draft_ids == plain.max_drafts == b""


def test_the_answer_has_tokens_row_after_row() -> None:
    step = make_step(DRAFTS)
    answer = decode_answer(step, response())
    rows = {item.sequence: item.row for item in step.work}
    results = [
        (rows[each.sequence], each.token.token_id, each.token.rank, each.ended) for each in answer.sampled
    ]
    assert results == [
        (2, 10, 1, False),
        (4, 7, 2, False),
        (4, 11, 3, False),
        (9, 12, 4, False),
        (9, 13, 5, True),
        (5, 14, 6, False),
    ]
    assert [each.token.top_tokens for each in answer.sampled] == [((i, 0.0),) for i in range(20, 26)]
    assert (answer.num_proposed, answer.num_tokens) == (3, 9)


@pytest.mark.parametrize(
    "columns",
    [
        {"num_tokens": [1, 2, 2]},
        {"num_tokens": [1, 2, 2, 2]},
        {"num_tokens": [1, 2, 3, 0]},
        {"num_tokens": [1, 1, 2, 2], "num_drafts": [0, 0, 2, 0]},
        {"num_tokens": [2, 1, 2, 1]},
        {"num_tokens": [2**30, 2, 2, 1]},
        {"num_drafts": [0, 0, 2]},
        {"num_drafts": [0, 0, 4, 0]},
        {"num_drafts": [0, 1, 2, 0]},
        {"num_drafts": [0, 0, -1, 0]},
        {"num_drafts": []},
        {"rows": [2, 4, 9, 6]},
        {"rows": [2, 2, 9, 5]},
        {"ended": [0, 0, 1]},
        {"token_ids": [10, 7, 11, 12, 13]},
        {"token_ids": [10, 7, 11, 12, 13, -1]},
    ],
)
def test_counts_that_cannot_be(columns: dict[str, list[int]]) -> None:
    with pytest.raises((ValueError, KeyError)):
        decode_answer(make_step(DRAFTS), response(**columns))
