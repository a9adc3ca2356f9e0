"""Check the initial values of a row's columns against values written by hand.

Other tests cover lists of any length, and that each parameter's declaration, message field and column
agree."""

import random
from operator import attrgetter
from typing import Any

import numpy as np
import pytest

from tests.support.shard.messages import floats, integers, make_bias, open_row, pack
from tgis.pb import shard_pb2 as pb
from tgis.router.scheduling.step import Step, WorkItem
from tgis.router.sequence import Details, Sequence, Stopping
from tgis.router.shards.codec import encode_step
from tgis.sampling_parameters import PARAMETERS, Sampling
from tgis.shard.runner.columns import COLUMNS, NOT_WANTED, ROW, Place, RaggedColumn, RaggedValues, read_row
from tgis.shard.sampling.sampler import ROW_PARAMETERS

SAMPLED = {
    "greedy": False,
    "seed": 2**64 - 1,
    "temperature": 0.5,
    "top_k": 2**31 - 1,
    "top_p": 0.25,
    "typical_p": 0.75,
    "min_p": 0.125,
    "repetition_penalty": 1.5,
    "min_new_tokens": 2**32 - 1,
    "length_penalty_start": 6,
    "length_penalty_factor": 1.25,
    "presence_penalty": -0.5,
    "frequency_penalty": 1.75,
    "watermark_gamma": 0.7,
    "watermark_delta": 2.5,
}
OFF = {
    "greedy": True,
    "seed": 0,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "typical_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "length_penalty_start": 0,
    "length_penalty_factor": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "watermark_gamma": 0.0,
    "watermark_delta": 0.0,
}
ONLY_RANDOM = {"seed", "temperature", "top_k", "top_p", "typical_p", "min_p"}
# Further parameters, which are floating-point numbers, as declared.
FURTHER = [each for each in PARAMETERS if each.name not in OFF]
SAMPLED |= {each.name: each.off + 0.5 for each in FURTHER}
OFF |= {each.name: each.off for each in FURTHER}
ONLY_RANDOM |= {each.name for each in FURTHER if each.random_only}
HEEDED_BY_GREEDY = OFF.keys() - ONLY_RANDOM - {"greedy"}
BIAS = ((4, 1.5), (0, -100.0))


def read(message: pb.OpenRow) -> dict[str, Any]:
    table = np.zeros(3, ROW)
    table[1] = read_row(message)
    return dict(zip(ROW.names, table[1].item(), strict=True))


def test_a_row_opens_with_the_values_of_its_message() -> None:
    details = {"logprobs": True, "top_n": 4, "input_tokens": True, "input_from": 2, "raw": True}
    message = open_row(1, [7, 8, 9, 10], prompt_len=3, max_new_tokens=5, eos=[1], sampling=SAMPLED, **details)
    message.encoder_token_ids = pack(range(6))
    state = {
        "open": True,
        "ended": False,
        "length": 4,
        "opened_len": 4,
        "prompt_len": 3,
        "limit": 8,
        "num_blocks": 0,
        "encoder_len": 6,
        "state_slot": 0,
        "logprobs": True,
        "ranks": False,
        "top_n": 4,
        "input_from": 2,
        "raw": True,
        "is_plain": False,
    }
    assert read(message) == state | SAMPLED
    message.details.input_tokens = False
    assert read(message)["input_from"] == NOT_WANTED
    for limit, ended in ((1, True), (2, False)):
        message.max_new_tokens = limit
        assert read(message)["ended"] == ended


def test_a_greedy_row_has_nothing_that_it_ignores() -> None:
    actual = read(open_row(0, [1], sampling=SAMPLED | {"greedy": True}))
    expected = OFF | {name: SAMPLED[name] for name in HEEDED_BY_GREEDY}
    assert {name: actual[name] for name in OFF} == expected


@pytest.mark.parametrize("name", OFF)
def test_a_row_is_plain_if_all_its_parameters_are_off(name: str) -> None:
    assert read(open_row(0, [1], sampling=OFF))["is_plain"]
    is_plain = name in ONLY_RANDOM
    assert read(open_row(0, [1], sampling=OFF | {name: SAMPLED[name]}))["is_plain"] == is_plain


def test_a_row_with_a_bias_is_not_plain() -> None:
    assert not read(open_row(0, [1], sampling=OFF | make_bias({3: 0.5})))["is_plain"]


def test_declarations_are_the_messages_fields() -> None:
    """Check that a request's value reaches the column of its parameter, for every parameter."""
    names = [each.name for each in PARAMETERS]
    lists = {"bias_token_ids", "biases"}
    assert {each.name for each in pb.Sampling.DESCRIPTOR.fields} - lists == set(names) == OFF.keys()
    assert list(ROW_PARAMETERS.names) == names
    for asked in (OFF, SAMPLED):
        sampling = {name: value for name, value in asked.items() if name != "min_new_tokens"}
        stopping = Stopping(max_new_tokens=5, min_new_tokens=asked["min_new_tokens"])
        details = Details(generated_tokens=True, ranks=True, raw=asked is SAMPLED)
        sequence = Sequence([1, 2], stopping, Sampling(**sampling, logit_bias=BIAS), details)
        item = WorkItem(sequence, 0, 0, 2, samples=True, opens=True, new_blocks=[0])
        step = Step(0, [item], 0, 0, 0, 0, joins=False, closed_rows=[])
        message = encode_step(step).opened_rows[0]
        result = read(message)
        assert {name: result[name] for name in OFF} == asked
        assert (result["raw"], result["is_plain"]) == (asked is SAMPLED, False)
        sampling = message.sampling
        assert tuple(zip(integers(sampling.bias_token_ids), floats(sampling.biases), strict=True)) == BIAS


def test_each_column_is_declared_once_and_sampling_needs_no_other_than_the_devices() -> None:
    names = [column.name for column in COLUMNS]
    assert len(set(names)) == len(names)
    on_device = {column.name for column in COLUMNS if column.place is not Place.HOST}
    assert on_device.issuperset(ROW_PARAMETERS.names)


@pytest.mark.parametrize(("dtype", "pad"), [("<i4", -1), ("<f4", 0.0)])
def test_lists_of_any_length(dtype: str, pad: float) -> None:
    """Check lists, as for biases and stop IDs, against Python lists.

    Only the longest of the requested rows counts."""
    column = RaggedColumn("any", dtype, Place.BOTH, attrgetter("cross_blocks"), pad)
    rng, values, plain = random.Random(1), RaggedValues(column, 8), {row: [] for row in range(8)}
    for _ in range(200):
        row, length = rng.randrange(8), rng.choice([0, 1, 3, 20])
        plain[row] = [rng.randrange(100) for _ in range(length)]
        values.open(row, pb.OpenRow(cross_blocks=np.array(plain[row], dtype).tobytes()))
        rows = rng.sample(range(8), rng.randint(1, 8))
        result = values.take(np.array(rows))
        assert result.dtype == dtype
        assert result.shape == (len(rows), max(len(plain[row]) for row in rows))
        for row, line in zip(rows, result.tolist(), strict=True):
            assert line[: len(plain[row])] == plain[row]
            assert set(line[len(plain[row]) :]) <= {pad}
