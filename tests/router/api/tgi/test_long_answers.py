"""Tests long answers of TGI's API: the best of several texts, and that other tasks run meanwhile."""

import asyncio
import gc
import itertools
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.tokenizers.trained import write_byte_level
from tgis.router.api.http.answers.sliced_encoder import SlicedEncoder
from tgis.router.api.http.answers.token_texts import TokenForms
from tgis.router.api.service import Result
from tgis.router.api.tgi.answers import GenerateJob, write_answer
from tgis.router.api.tgi.rules import TGI
from tgis.router.api.tgi.types import GenerateParameters, GenerateRequest
from tgis.router.engine.handle import SequenceSpec
from tgis.router.events import Output, Timings
from tgis.router.requests.call import GenerationCall
from tgis.router.requests.parameters import Parameters
from tgis.router.sequence import Stopping, StopReason, TokenDetail
from tgis.router.text.detokenizer import Vocabulary
from tgis.router.text.stop_sequences import StopSequences, TextStream
from tgis.router.text.tokenizer import Tokenizer
from tgis.sampling_parameters import Sampling

LONGEST_HOLD_S = 0.05
NUM_TOP = 5


@pytest.fixture
def vocabulary(tmp_path: Path) -> Any:
    write_byte_level(tmp_path)
    tokenizer = Tokenizer(tmp_path, 1)
    yield Vocabulary(tokenizer)
    tokenizer.close()


def make_result(vocabulary: Vocabulary, r: random.Random, count: int, seed: int) -> Result:
    def one() -> tuple[int, float]:
        return r.randrange(2, 300), -8 * r.random()

    spec = SequenceSpec((5, 6), Stopping(count), Sampling(greedy=False, seed=seed))
    stream, result = TextStream(vocabulary, StopSequences()), Result(spec)
    for number in range(1, count + 1):
        detail = TokenDetail(*one(), 0, tuple(one() for _ in range(NUM_TOP)))
        reason = StopReason.MAX_TOKENS if number == count else StopReason.NOT_FINISHED
        stream.push(detail.token_id, reason)
        result.tokens.append(detail)
        result.last = Output(stream.take(1), (detail,), number, reason, timings=Timings(0, 0, 0))
        result.texts += result.last.texts
    result.input_tokens = tuple(TokenDetail(*one()) for _ in range(2))
    return result


async def write(vocabulary: Vocabulary, results: list[Result]) -> Any:
    body = GenerateRequest("a b", GenerateParameters(details=True, decoder_input_details=True))
    parameters = Parameters(input_tokens=True, top_n_tokens=NUM_TOP, n=len(results))
    call = GenerationCall("Generate", "single", ["a b"], parameters, str, (), "", api=TGI)
    job = GenerateJob(body, call, TokenForms(vocabulary), False, "cpu")
    return await write_answer(job, results, SlicedEncoder(asyncio.Lock()))


async def body_of(response: Any) -> Any:
    messages: asyncio.Queue[Any] = asyncio.Queue()
    await response({"type": "http"}, None, messages.put)
    assert messages.get_nowait()["status"] == 200
    return json.loads(b"".join(messages.get_nowait()["body"] for _ in range(messages.qsize())))


async def test_the_best_of_several(vocabulary: Vocabulary) -> None:
    """Texts of different lengths are compared by their mean log-probability, and all are in the answer."""
    r = random.Random(3)
    for _ in range(8):
        results = [make_result(vocabulary, r, r.randrange(1, 200), seed) for seed in range(4)]
        means = [sum(each.logprob for each in one.tokens) / len(one.tokens) for one in results]
        best = means.index(max(means))
        answer = await body_of(await write(vocabulary, results))
        details = answer["details"]
        assert answer["generated_text"] == "".join(results[best].text)
        assert details["seed"] == best
        others = [one for one in range(4) if one != best]
        assert [one["seed"] for one in details["best_of_sequences"]] == others
        for sequence, index in zip([details, *details["best_of_sequences"]], [best, *others], strict=True):
            tokens = results[index].tokens
            assert [(one["id"], one["logprob"]) for one in sequence["tokens"]] == [one[:2] for one in tokens]
            assert "".join(one["text"] for one in sequence["tokens"]) == "".join(results[index].text)
            tops = [[(top["id"], top["logprob"]) for top in each] for each in sequence["top_tokens"]]
            assert tops == [list(one.top_tokens) for one in tokens]
            assert sequence["prefill"][0]["logprob"] is None
            assert sequence["prefill"][1]["logprob"] == results[index].input_tokens[1].logprob
            assert sequence["generated_tokens"] == len(tokens)


@pytest.mark.slow
async def test_long_answers_hold_up_nothing(vocabulary: Vocabulary) -> None:
    results = [make_result(vocabulary, random.Random(1), 8192, 0)]
    times: list[float] = []

    async def tick() -> None:
        while True:
            times.append(time.thread_time())
            await asyncio.sleep(0)

    gc.freeze()  # a router's collector has no objects of tests
    task = asyncio.create_task(tick())
    await write(vocabulary, results)
    task.cancel()
    assert len(times) > 8192 // 64
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) < LONGEST_HOLD_S
