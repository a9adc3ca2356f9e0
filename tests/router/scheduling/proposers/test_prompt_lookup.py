"""Check n-gram drafts against a plain search of the text, the cost model, and the limits on drafts."""

import random
from itertools import pairwise
from typing import Any

import pytest

from tgis.router.scheduling.block_pool import BlockPool
from tgis.router.scheduling.proposers.prompt_lookup import TOKENS_AT_ONCE, NgramIndex, PromptLookup
from tgis.router.scheduling.scheduler import Scheduler, count_allowed_drafts
from tgis.router.scheduling.step import NO_DRAFTS, Drafts
from tgis.router.sequence import Sequence, Stopping


def plain_source(token_ids: list[int]) -> int:
    """Return the position of the predicted next token.

    After a right prediction it is the next position; otherwise it follows the last earlier occurrence of the
    newest four tokens, or of the newest two."""
    source = -1
    for length in range(1, len(token_ids) + 1):
        if source >= 0 and token_ids[source] == token_ids[length - 1]:
            source += 1
            continue
        source = -1
        for size in (4, 2):
            newest = token_ids[max(length - size, 0) : length]
            places = [
                end
                for end in range(size, length)
                if len(newest) == size and token_ids[end - size : end] == newest
            ]
            if places:
                source = places[-1]
                break
    return source


@pytest.mark.parametrize("seed", range(60))
def test_drafts_are_the_tokens_after_the_last_match(seed: int) -> None:
    r = random.Random(seed)
    vocab = r.sample(range(1, 1 << 20), r.choice([2, 3, 8, 40]))
    token_ids = [r.choice(vocab) for _ in range(r.randint(0, 60))]
    if token_ids and r.random() < 0.5:
        token_ids += token_ids[: r.randint(1, len(token_ids))]
    split = r.randint(0, len(token_ids))
    history = NgramIndex(token_ids[: r.randint(0, split)])
    skipped = len(history._token_ids)
    assert history.read(token_ids[skipped:split])
    assert history.read(token_ids[skipped:])
    source, num_tokens = plain_source(token_ids), r.randint(1, 9)
    if source < 0:
        assert history.chances(num_tokens) == []
        return
    chances = history.chances(num_tokens)
    assert len(chances) == num_tokens
    assert all(0 < after <= before <= 1 for before, after in pairwise(chances))
    round_and_round = token_ids[source:] * num_tokens
    assert history.expect(num_tokens) == round_and_round[:num_tokens]


def test_a_long_text_is_read_in_pieces() -> None:
    history, token_ids = NgramIndex([]), list(range(5, 5 + 2 * TOKENS_AT_ONCE))
    assert [history.read(token_ids) for _ in range(2)] == [False, True]
    assert history.read([*token_ids, 5])


def test_acceptance_estimates_follow_outcomes() -> None:
    always, never = NgramIndex([]), NgramIndex([])
    always.read([1, 2, 3] * 40)
    assert always.chances(2)[1] > 0.9
    r = random.Random(1)
    text = [token for _ in range(120) for token in (1, 2, r.randrange(10, 10_000))]
    never.read([*text, 1, 2])
    assert never.chances(1)[0] < 0.1


def new_sequence(token_ids: list[int], **limits: Any) -> Sequence:
    return Sequence(list(token_ids), Stopping(**{"max_new_tokens": 100, **limits}))


def proposer(fixed: float, per_token: float, max_drafts: int = 6) -> PromptLookup:
    return PromptLookup(max_drafts, lambda num_tokens: fixed + per_token * num_tokens)


LOOP = [7, 8, 9] * 30


def test_a_loop_is_followed_as_far_as_it_is_worth() -> None:
    cheap, dear = proposer(10.0, 0.1), proposer(10.0, 9.0)
    for one in (cheap, dear):
        assert one.begin(1, 100)
    assert cheap.propose(new_sequence(LOOP), 100) == Drafts([7, 8, 9, 7, 8, 9])
    assert cheap.propose(new_sequence(LOOP), 4) == Drafts([7, 8, 9, 7])
    assert 0 < dear.propose(new_sequence(LOOP), 100).max_tokens <= 6


def test_nothing_is_guessed_of_a_text_that_does_not_repeat() -> None:
    one = proposer(10.0, 0.1)
    one.begin(1, 100)
    assert one.propose(new_sequence(list(range(200))), 100) == NO_DRAFTS


def test_nothing_is_guessed_before_a_step_was_timed_or_where_steps_are_full() -> None:
    assert not PromptLookup(6, lambda num_tokens: 0.0).begin(1, 100)
    assert not proposer(0.0, 1.0).begin(64, 100)
    assert not proposer(1.0, 1.0).begin(0, 100)
    assert not proposer(1.0, 1.0).begin(1, 0)
    assert proposer(1.0, 0.01).begin(8, 100)


def test_a_step_of_one_size_does_not_forbid_to_try() -> None:
    """Check that the time of one-token steps alone is no evidence that a two-token step takes twice as
    long."""
    one = proposer(0.0, 10.0)
    assert one.begin(1, 100)
    assert one.propose(new_sequence(LOOP), 100).max_tokens


def test_a_step_has_so_many_drafts_together() -> None:
    one = proposer(10.0, 0.01, max_drafts=4)
    assert one.begin(3, 6)
    waiting = new_sequence(LOOP)
    waiting.num_unanswered = 1
    assert one.propose(waiting, 100).max_tokens == 4, "the unanswered token is not of this step"
    assert [one.propose(new_sequence(LOOP), 100).max_tokens for _ in range(3)] == [4, 2, 0]


@pytest.mark.parametrize(
    ("num_tokens", "free", "switch_len", "room"),
    [
        (10, 20, 0, 7),  # max_new_tokens is 8, and the last token is not computed
        (13, 20, 0, 4),
        (17, 20, 0, 0),
        (10, 2, 0, 2),  # two are running, so the free blocks are for others and drafts end at the block's end
        (10, 3, 0, 6),
        (12, 2, 0, 0),
        (10, 20, 12, 2),
        (10, 20, 10, 0),
    ],
)
def test_room(num_tokens: int, free: int, switch_len: int, room: int) -> None:
    sequence = new_sequence([1] * 10, max_new_tokens=8)
    sequence.token_ids += [1] * (num_tokens - 10)
    pool = BlockPool(free + 3, 4)
    blocks = pool.allocate([], 3)
    assert blocks is not None
    sequence.block_table = blocks[: -(-num_tokens // 4)]
    pool = BlockPool(free, 4)
    assert count_allowed_drafts(pool, sequence, 2, switch_len) == room


def test_a_sequence_with_nothing_to_guess_runs_ahead() -> None:
    """Check that a sequence with drafts waits for its last token and then sends it with the drafts."""
    one = proposer(10.0, 0.1, max_drafts=3)
    scheduler = Scheduler(BlockPool(40, 4), 8, proposer=one)
    plain, looping = new_sequence(list(range(10, 30))), new_sequence(LOOP)
    seen = []
    scheduler.add(plain)
    scheduler.add(looping)
    steps = [scheduler.next_step(1000) for _ in range(3)]
    for _ in range(3):
        step = steps.pop(0)
        assert step is not None
        seen.append([(work.sequence is looping, work.drafts.max_tokens) for work in step.work])
        scheduler.apply_answer(step)
        for work in step.work:
            tokens = (
                [*work.drafts.token_ids, 7] if work.drafts.max_tokens else [LOOP[len(looping.token_ids) % 3]]
            )
            for token in tokens if work.sequence is looping else [len(plain.token_ids) + 10]:
                scheduler.append_token(work.sequence, token)
        steps.append(scheduler.next_step(1000))
    assert seen == [[(False, 0), (True, 0)], [(False, 0)], [(False, 0)]]
    step = next(step for step in steps if step is not None and len(step.work) == 2)
    assert [(work.sequence is looping, work.drafts.max_tokens) for work in step.work] == [
        (False, 0),
        (True, 3),
    ]
    assert (scheduler.num_drafts, step.num_drafts, step.num_tokens) == (3, 3, 5)


def test_accepted_drafts_are_found_by_others_and_rejected_ones_are_not() -> None:
    one = proposer(10.0, 0.1, max_drafts=6)
    pool = BlockPool(40, 4)
    scheduler = Scheduler(pool, 8, proposer=one)
    first = new_sequence(LOOP[:22])
    scheduler.add(first)
    step = scheduler.next_step(1000)
    assert step is not None
    scheduler.apply_answer(step)
    scheduler.append_token(first, LOOP[22])
    step = scheduler.next_step(1000)
    assert step is not None
    assert list(step.work[0].drafts.token_ids) == LOOP[23:29]
    scheduler.apply_answer(step)
    for token in [*LOOP[23:26], 99]:
        scheduler.append_token(first, token)
    assert (first.num_computed, first.num_scheduled, first.num_pending) == (26, 26, 1)
    assert scheduler.num_accepted_drafts == 3
    second = new_sequence([*LOOP[:30]])
    scheduler.add(second)
    assert scheduler.next_step(1000) is not None
    assert second.num_scheduled == 30
    assert second.num_published == 6, "24 tokens in full blocks"
