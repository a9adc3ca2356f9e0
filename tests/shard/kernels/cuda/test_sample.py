"""Sampling on a GPU against the CPU's sampler and row table, and the state of rows against a reference
model."""

from copy import deepcopy

import numpy as np
import pytest
import torch

from tests.support import plain_sampling
from tests.support.cuda.interpreter import interpreted_modules
from tests.support.cuda.sampled_rows import Cases, FilteredCases, Sample, SampledRows, count, write_row
from tests.support.shard.messages import GREEDY, SAMPLE, integers, make_bias, open_row
from tgis.shard.kernels.cuda import sample as compiled
from tgis.shard.kernels.cuda.step_state import Flag, Word
from tgis.shard.sampling import sampler

BLOCK = 128
SAMPLED, ENDED, UNUSABLE = (int(flag) for flag in Flag)


@pytest.fixture(params=["plain", "launch"])
def sample(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sample:
    if request.param == "plain":
        return compiled.plain
    module = interpreted_modules()["sample"]
    monkeypatch.setattr(module, "BLOCK", BLOCK)

    # Infinities are valid, and GPUs do not warn about them.
    launch: Sample = np.errstate(all="ignore")(module.launch)
    return launch


@pytest.mark.parametrize(
    ("vocab_size", "num_rows"),
    [(40, 20), *(pytest.param(size, 70, marks=pytest.mark.slow) for size in (40, 205))],
)
def test_chooses_as_the_cpu(sample: Sample, vocab_size: int, num_rows: int) -> None:
    """Random rows for several steps, some of them guided, in changing batches and order."""
    check_against_cpu(sample, vocab_size, num_rows, seed=vocab_size)


@pytest.mark.parametrize(
    "vocab_size",
    [
        50_257,
        pytest.param(128_256, marks=pytest.mark.slow),
        pytest.param(256_000, marks=pytest.mark.slow),
    ],
)
def test_chooses_among_many_tokens(sample: Sample, vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the block size of GPUs."""
    monkeypatch.setattr(interpreted_modules()["sample"], "BLOCK", compiled.BLOCK)
    check_against_cpu(sample, vocab_size, num_rows=2, seed=7, num_steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_chooses_as_the_cpu_at_length(sample: Sample, seed: int) -> None:
    check_against_cpu(sample, vocab_size=[35, 128, 256, 333, 700][seed % 5], num_rows=40, seed=1000 + seed)


def check_against_cpu(sample: Sample, vocab_size: int, num_rows: int, seed: int, num_steps: int = 2) -> None:
    rows, cases = SampledRows(num_rows, vocab_size), Cases(seed, vocab_size)
    for row in range(num_rows):
        rows.open(cases.message(row))
    tokens: dict[int, list[int]] = {row: [] for row in range(num_rows)}
    idle = rows.state.idle_row
    for step in range(num_steps):
        for row in range(step, num_rows, 5):
            rows.guide(row, cases.allowed(), must_end=row % 2 == 0)
        order = [*cases.rng.sample(range(num_rows), num_rows - step), idle, idle]
        logits = cases.logits(len(order))
        before = deepcopy(rows.state)
        wanted = rows.step_on_cpu(logits, order)
        got = rows.step(sample, logits, order)
        for i, row in enumerate(order[:-2]):
            assert got[i] == wanted[i], (step, rows.messages[row], rows.guided.get(row))
            tokens[row] += [got[i][0]] if got[i][1] & SAMPLED else []
        assert got[-2:] == [(0, 0), (0, 0)]
        left = [row for row in range(num_rows + 1) if row not in order]
        assert torch.equal(rows.state.words[[*left, idle]], before.words[[*left, idle]])
    check_state(rows, tokens)


@pytest.mark.parametrize(
    ("vocab_size", "num_rows", "num_interpreted"),
    [(333, 300, 3), pytest.param(7, 100, 4, marks=pytest.mark.slow)],
)
def test_filters_keep_the_same_tokens_as_the_cpu(
    sample: Sample, vocab_size: int, num_rows: int, num_interpreted: int
) -> None:
    num_rows = num_rows if sample is compiled.plain else num_interpreted
    assert check_filters(sample, vocab_size, num_rows, seed=vocab_size) < 3


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_thousand_rows_choose_as_the_cpu() -> None:
    """Compare token by token. In a few rows rounding decides."""
    vocab_sizes = [3, 40, 64, 65, 150, 333, 1025]
    num_other = sum(
        check_filters(compiled.plain, vocab_size, 500, seed=100 + 10 * i + vocab_size)
        for i in range(6)
        for vocab_size in vocab_sizes
    )
    assert num_other < 100


def check_filters(sample: Sample, vocab_size: int, num_rows: int, seed: int) -> int:
    """Return the number of rows in which another token was chosen because rounding decides."""
    rows, cases = SampledRows(num_rows, vocab_size), FilteredCases(seed, vocab_size)
    for row in range(num_rows):
        rows.open(cases.message(row))
    logits = cases.logits(num_rows)
    wanted, got = rows.step_on_cpu(logits, range(num_rows)), rows.step(sample, logits, range(num_rows))
    others = [row for row in range(num_rows) if got[row] != wanted[row]]
    for row in others:
        sampling = rows.messages[row].sampling
        names = "temperature", "top_k", "top_p", "min_p", "typical_p"
        plain = plain_sampling.Row(
            logits[row].tolist(), [1], **{name: getattr(sampling, name) for name in names}
        )
        scores = plain_sampling.process(plain)
        assert min(scores.mass, scores.order) < 1e-6 or scores.typical_order < 1e-5, (row, sampling)
    return len(others)


def check_state(rows: SampledRows, tokens: dict[int, list[int]]) -> None:
    """Compare the state with that of new rows that contain the sampled tokens."""
    plain = deepcopy(rows.state)
    for row, message in rows.messages.items():
        write_row(plain, message)
        words, sampled = plain.words[row], tokens[row]
        words[Word.LENGTH] += len(sampled)
        if sampled:
            words[Word.LAST_TOKEN] = sampled[-1]
        words[Word.ENDED] = int(rows.has_ended(row))
        words[Word.IS_GUIDED], words[Word.MUST_END] = rows.state.words[row, [Word.IS_GUIDED, Word.MUST_END]]
        token_ids = integers(message.token_ids)
        prompt, generated = token_ids[: message.prompt_len], token_ids[message.prompt_len :]
        plain.token_counts[row] = torch.tensor(count(prompt, generated + sampled, rows.vocab_size))
    for name, table in vars(plain).items():
        if isinstance(table, torch.Tensor):
            assert torch.equal(table.nan_to_num(-1.5), getattr(rows.state, name).nan_to_num(-1.5)), name


def test_logits_of_rows_that_draw_are_changed_as_on_the_cpu(sample: Sample) -> None:
    """Same bits, also after length penalties have grown for hundreds of tokens."""
    vocab_size, num_rows = 40, 32
    rows, cases = SampledRows(num_rows, vocab_size), Cases(3, vocab_size)
    rng = cases.rng
    for row in range(num_rows):
        sampling = {
            **SAMPLE,
            "temperature": rng.uniform(0.1, 3),
            "length_penalty_factor": 1 + rng.choice([1e-4, 1e-2, 0.3]),
            "repetition_penalty": rng.uniform(0.5, 2),
            "presence_penalty": rng.uniform(-2, 2),
            "frequency_penalty": rng.uniform(-2, 2),
            **make_bias({i: rng.gauss(0, 3) for i in cases.hot[::2]}),
        }
        generated = [rng.choice(cases.hot) for _ in range(rng.randrange(1, 600))]
        token_ids = [*cases.hot[:2], *generated]
        rows.open(
            open_row(row, token_ids, prompt_len=2, max_new_tokens=1000, eos=cases.hot[3:6], sampling=sampling)
        )
    logits = cases.logits(num_rows)
    wanted, index = logits.clone(), np.arange(num_rows)
    batch = rows.table.sampling_batch(index, np.zeros(num_rows, np.bool_), np.False_)
    sampler.sample(wanted, batch, rows.table.seen)
    sampled_rows = torch.arange(num_rows, dtype=torch.int32)
    sample(logits, rows.state, sampled_rows, torch.empty(num_rows, 2, dtype=torch.int32))
    assert torch.equal(logits, wanted)


def test_unusable_rows_end_and_do_not_affect_others(sample: Sample) -> None:
    """One row per block with a fault."""
    vocab_size = 2 * BLOCK + 9
    places = [0, BLOCK - 1, BLOCK, vocab_size - 1]
    faults = [(value, place) for value in (torch.nan, torch.inf) for place in places]
    num_rows = 2 * len(faults) + 2
    cases = Cases(1, vocab_size)
    logits = cases.logits(num_rows)
    for (value, place), i in zip(faults, range(1, num_rows, 2), strict=False):
        logits[i, place] = value
    logits[-1] = -torch.inf
    rows = SampledRows(num_rows, vocab_size)
    for row in range(num_rows):
        sampling = {**SAMPLE, "seed": row, "temperature": 0.7} if row % 4 < 2 else GREEDY
        rows.open(open_row(row, [1, 2], sampling=sampling))
    before = rows.state.words.clone()
    wanted = rows.step_on_cpu(logits, range(num_rows))
    got = rows.step(sample, logits, range(num_rows))
    assert got == wanted
    assert [flags for _, flags in got] == [SAMPLED, UNUSABLE] * len(faults) + [SAMPLED, UNUSABLE]
    failed = rows.state.words[1::2]
    assert (failed[:, Word.ENDED] == 1).all()
    assert torch.equal(failed[:, Word.LENGTH], before[1::2, Word.LENGTH])
    assert rows.step(sample, cases.logits(num_rows), range(num_rows))[1::2] == [(0, 0)] * (num_rows // 2)


def test_a_mask_hides_nan_logits(sample: Sample) -> None:
    """One mask per half of a word, whose highest bit is the sign."""
    vocab_size = 75
    rows = SampledRows(3, vocab_size)
    logits = torch.full((3, vocab_size), torch.nan)
    for row, only in enumerate([31, 32, 74]):
        rows.open(open_row(row, [1, 2], sampling={**SAMPLE, "seed": row}))
        rows.guide(row, torch.arange(vocab_size) == only, must_end=False)
        logits[row, only] = -3.0
    assert rows.step(sample, logits, range(3)) == [(31, SAMPLED), (32, SAMPLED), (74, SAMPLED)]


def test_a_grammar_may_end_a_row_early(sample: Sample) -> None:
    """Both rows' grammars allow only the end; this is known only of the first row."""
    rows = SampledRows(2, 40)
    for row in range(2):
        rows.open(open_row(row, [1, 2], eos=[9], sampling={**GREEDY, "min_new_tokens": 1}))
        rows.guide(row, torch.arange(40) == 9, must_end=row == 0)
    wanted = [(9, SAMPLED | ENDED), (0, UNUSABLE)]
    assert rows.step_on_cpu(torch.zeros(2, 40), range(2)) == wanted
    assert rows.step(sample, torch.zeros(2, 40), range(2)) == wanted


@pytest.mark.parametrize("sampling", [GREEDY, {**SAMPLE, "seed": 3}])
def test_the_lowest_of_equals_is_chosen(sample: Sample, sampling: dict[str, object]) -> None:
    """Within a block and between blocks. A row with temperature 1 draws among equals."""
    vocab_size = 3 * BLOCK
    logits = torch.zeros(4, vocab_size)
    for i, tops in enumerate([[5, 6], [BLOCK - 1, BLOCK], [200, 2 * BLOCK + 5], [0, vocab_size - 1]]):
        logits[i, tops] = 50.0
    rows = SampledRows(4, vocab_size)
    for row in range(4):
        rows.open(open_row(row, [1, 2], sampling=sampling))
    wanted = rows.step_on_cpu(logits, range(4))
    assert rows.step(sample, logits, range(4)) == wanted
    if sampling["greedy"]:
        assert [token_id for token_id, _ in wanted] == [5, BLOCK - 1, 200, 0]


def test_a_row_samples_the_same_alone_and_in_a_batch(sample: Sample) -> None:
    vocab_size, num_rows = 150, 10
    cases = Cases(5, vocab_size)
    crowd = SampledRows(num_rows, vocab_size)
    for row in range(num_rows):
        crowd.open(cases.message(row))
    alone, logits = SampledRows(num_rows, vocab_size), cases.logits(num_rows)
    alone.state = deepcopy(crowd.state)
    together = crowd.step(sample, logits, range(num_rows))
    assert [alone.step(sample, logits[row : row + 1], [row])[0] for row in range(num_rows)] == together
    assert torch.equal(alone.state.words, crowd.state.words)
    assert torch.equal(alone.state.token_counts, crowd.state.token_counts)


def test_counts_saturate(sample: Sample) -> None:
    """Tokens in the prompt and others. A bias decides the token of the row."""
    rows = SampledRows(2, 40)
    for row in range(2):
        sampling = {**GREEDY, **make_bias({7: 100.0})}
        rows.open(open_row(row, [[1], [7]][row], max_new_tokens=100, sampling=sampling))
    rows.state.token_counts[:, 7] += 2**15 - 3
    for expected in (2**15 - 2, 2**15 - 1, 2**15 - 1):
        assert [token_id for token_id, _ in rows.step(sample, torch.zeros(2, 40), [0, 1])] == [7, 7]
        assert rows.state.token_counts[:2, 7].tolist() == [expected, expected - 2**15]


def test_rows_end_at_their_limit_and_at_stop_tokens(sample: Sample) -> None:
    """Only the first stop ids of a row count; the others remain from earlier rows."""
    rows = SampledRows(3, 40)
    for row, eos in enumerate([[9, 4], [9], []]):
        rows.open(open_row(row, [1, 2], max_new_tokens=3, eos=eos, sampling=GREEDY))
    rows.state.stop_ids[1, 1] = 4
    logits = torch.zeros(3, 40)
    logits[:, 4] = 1.0
    flags = [[flag for _, flag in rows.step(sample, logits, range(3))] for _ in range(4)]
    both = SAMPLED | ENDED
    assert flags == [[both, SAMPLED, SAMPLED], [0, SAMPLED, SAMPLED], [0, both, both], [0, 0, 0]]
    assert rows.state.words[:3, Word.LENGTH].tolist() == [3, 5, 5]


def test_a_row_may_have_as_many_biases_and_stops_as_fit(sample: Sample) -> None:
    vocab_size = 1100
    rows = SampledRows(2, vocab_size)
    biases = {i: float(i % 17) for i in range(40, 1064)}
    for row in range(2):
        sampling = {**GREEDY, **make_bias(biases), "min_new_tokens": row}
        rows.open(open_row(row, [1], eos=range(1031, 1063), sampling=sampling))
    logits = Cases(2, vocab_size).logits(2)
    logits[:, 1062] += 40.0
    wanted = rows.step_on_cpu(logits, [0, 1])
    assert rows.step(sample, logits, [0, 1]) == wanted
    assert wanted[0] == (1062, SAMPLED | ENDED)


def test_no_rows_are_sampled(sample: Sample) -> None:
    rows = SampledRows(1, 40)
    assert rows.step(sample, torch.zeros(0, 40), []) == []
