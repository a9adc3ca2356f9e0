"""Check that only texts which are too long by their bytes alone are refused before tokenization."""

import random
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer

from tests.support.router.fake_shard import VOCAB_SIZE
from tests.support.router.router_process import MAX_SEQUENCE_LENGTH, Setup, start_router, stop_router
from tests.support.router.router_usage import RouterProcesses
from tests.support.tokenizers.trained import write_byte_level
from tgis.pb import generation_pb2 as pb

LONGEST = " 👩\u200d👩\u200d👧"
"""The longest entry of the vocabulary; its repetitions have one token each."""
BOUND = 19
COUNT = "tgi_request_raw_input_length_count"


def write_without_beginning(directory: Path) -> Tokenizer:
    return write_byte_level(directory, VOCAB_SIZE, bos=False)


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    directory = tmp_path_factory.mktemp("bytes")
    setup = start_router(directory, 1, write_tokenizer=write_without_beginning)
    assert len(LONGEST.encode()) == BOUND
    assert len(setup.tokenizer.encode(LONGEST * 30).ids) == 30
    yield setup
    assert stop_router(setup) == 0, setup.service.output


def generate(
    setup: Setup, texts: list[str], min_new: int = 0, truncate: int = 0
) -> list[pb.GenerationResponse]:
    stopping = pb.StoppingCriteria(min_new_tokens=min_new, max_new_tokens=max(min_new, 1))
    params = pb.Parameters(stopping=stopping, truncate_input_tokens=truncate)
    requests = [pb.GenerationRequest(text=text) for text in texts]
    return list(setup.stub.Generate(pb.BatchedGenerationRequest(requests=requests, params=params)).responses)


def refusal(setup: Setup, texts: list[str], min_new: int = 0, truncate: int = 0) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        generate(setup, texts, min_new, truncate)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return str(caught.value.details())


def num_tokenized(setup: Setup) -> int:
    with urllib.request.urlopen(setup.http + "/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return next((int(float(line.split()[-1])) for line in lines if line.startswith(COUNT)), 0)


def too_long(shown: int | str) -> str:
    return f"input tokens ({shown}) plus prefix length (0) must be < {MAX_SEQUENCE_LENGTH}"


def too_long_with(minimum: int, shown: int | str) -> str:
    sums = f"input tokens ({shown}) plus prefix length (0) plus min_new_tokens ({minimum})"
    return f"{sums} must be <= {MAX_SEQUENCE_LENGTH}"


def test_an_input_of_exactly_the_limit_is_served(router: Setup) -> None:
    for num_tokens, min_new in ((199, 0), (199, 1), (140, 60)):
        [response] = generate(router, [LONGEST * num_tokens], min_new)
        assert (response.input_token_count, response.generated_token_count) == (num_tokens, max(min_new, 1))
    [response] = generate(router, [LONGEST * 4000], truncate=199)
    assert response.input_token_count == 199


def test_refusals(router: Setup) -> None:
    before = num_tokenized(router)
    by_bytes = [
        (refusal(router, [LONGEST * 200]), too_long("at least 200")),
        (refusal(router, [LONGEST * 199 + "."]), too_long("at least 200")),
        (refusal(router, ["word " * 100_000]), too_long(f"at least {-(-500_000 // BOUND)}")),
        (refusal(router, [LONGEST * 300], truncate=250), too_long("at least 250")),
        (refusal(router, [LONGEST * 300], truncate=400), too_long("at least 300")),
        (refusal(router, [LONGEST * 141], 60), too_long_with(60, "at least 141")),
        (refusal(router, [LONGEST * 300], 60, 141), too_long_with(60, "at least 141")),
        (refusal(router, [LONGEST * 200], 60), too_long("at least 200")),
    ]
    for actual, expected in by_bytes:
        assert actual == expected
    assert num_tokenized(router) == before
    small = "." * 300
    num_tokens = len(router.tokenizer.encode(small).ids)
    assert num_tokens > 200
    assert refusal(router, [small]) == too_long(num_tokens)
    assert num_tokenized(router) == before + 1


def test_the_first_text_of_a_batch_that_cannot_be_served_decides(router: Setup) -> None:
    fits, small, large = "fox", "." * 300, LONGEST * 250
    exact, least = too_long(len(router.tokenizer.encode(small).ids)), too_long("at least 250")
    for texts, expected, num_read in (
        ([fits, small, large, fits], exact, 2),
        ([fits, fits, large, small, fits], least, 2),
        ([large, small], least, 0),
        ([fits, "", large], "tokenizer error the input has no tokens", 2),
    ):
        before = num_tokenized(router)
        assert refusal(router, texts) == expected
        assert num_tokenized(router) == before + num_read


def test_an_empty_text_is_refused_for_having_no_tokens(router: Setup) -> None:
    assert refusal(router, [""], min_new=199) == "tokenizer error the input has no tokens"


def test_refusals_cost_less_than_tokenizing(router: Setup) -> None:
    """Compare CPU times, which other processes do not affect."""
    text = "".join(random.Random(0).choices(["word", " ", "an", "\n", "é"], k=300_000))
    began = time.process_time()
    router.tokenizer.encode_batch_fast([text])
    cost = time.process_time() - began
    processes = RouterProcesses(router)
    before = processes.cpu_s
    for _ in range(4):
        assert "(at least " in refusal(router, [text])
    assert processes.cpu_s - before < cost


def outcome_of_rules(setup: Setup, texts: list[str], min_new: int, truncate: int) -> str | list[int]:
    """Return the lengths of the inputs, or the refusal.

    The refusal is of the first text that is too long; it gives the lower bound where that is enough."""
    lengths = []
    for text in texts:
        num_tokens, num_least = len(setup.tokenizer.encode(text).ids), -(-len(text.encode()) // BOUND)
        if truncate:
            num_tokens, num_least = min(num_tokens, truncate), min(num_least, truncate)
        if num_tokens == 0:
            return "tokenizer error the input has no tokens"
        is_proved = num_least >= MAX_SEQUENCE_LENGTH or num_least + min_new > MAX_SEQUENCE_LENGTH
        shown = f"at least {num_least}" if is_proved else num_tokens
        counted = num_least if is_proved else num_tokens
        if counted >= MAX_SEQUENCE_LENGTH:
            return too_long(shown)
        if counted + min_new > MAX_SEQUENCE_LENGTH:
            return too_long_with(min_new, shown)
        lengths.append(num_tokens)
    return lengths


def draw_text(r: random.Random) -> str:
    part = r.choice([LONGEST, LONGEST, "fox ", "x", "\u0301", "\n \t", "word é 東"])
    num_bytes = r.choice([1, 30, 60, 140, 198, 199, 200, 201, 400]) * BOUND
    text = part * (num_bytes // len(part.encode()))
    return r.choice(["", text, text + "x", text[:-1], text[: r.randrange(400)]])


def test_random_batches_meet_the_rules(router: Setup) -> None:
    r = random.Random(0)
    outcomes: set[object] = set()
    for _ in range(150):
        texts = [draw_text(r) for _ in range(r.choice([1, 1, 2, 4]))]
        if r.random() < 0.7:
            texts = [text or "fox" for text in texts]
        min_new, truncate = r.choice([0, 0, 1, 2, 60]), r.choice([0, 0, 1, 140, 141, 198, 199, 200, 1000])
        expected = outcome_of_rules(router, texts, min_new, truncate)
        if isinstance(expected, str):
            assert refusal(router, texts, min_new, truncate) == expected
            outcomes.add(("at least" in expected, "min_new_tokens" in expected, "must" in expected))
        else:
            responses = generate(router, texts, min_new, truncate)
            assert [response.input_token_count for response in responses] == expected
            outcomes.add("served")
    assert len(outcomes) == 6
