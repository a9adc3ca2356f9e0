"""Tests the service behind another API, whose calls are JSON instead of protobuf, with either engine."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import fields, replace
from hashlib import blake2b
from pathlib import Path
from struct import pack

import pytest

from tests.support.router.engine_pair import Scene, open_scene
from tests.support.router.fake_shard import EOS, VOCAB_SIZE
from tests.support.router.model_of_shard import integers, next_token
from tests.support.router.served_grpc import LIMITS
from tests.support.router.served_tgi import until
from tests.support.tokenizers.trained import write_byte_level
from tgis.logs import FIELDS
from tgis.router.api.fmaas.rules import FMAAS
from tgis.router.api.service import GenerationService
from tgis.router.errors import OverloadedError, RequestError
from tgis.router.events import Output
from tgis.router.grammar.compiler import GrammarCompiler
from tgis.router.requests.accounting import Accounting
from tgis.router.requests.call import GenerationCall
from tgis.router.requests.parameters import Parameters
from tgis.router.requests.tracing import Tracing
from tgis.router.requests.validation import Validator
from tgis.router.sequence import StopReason
from tgis.router.text.detokenizer import Vocabulary
from tgis.router.text.tokenizer import Tokenizer

PROMPT = "The quick brown fox"


class JsonApi:
    """API whose calls are objects with `texts` and parameters. Answers are lists of [text, number,
    reason]."""

    def __init__(self, scene: Scene, directory: Path) -> None:
        write_byte_level(directory, VOCAB_SIZE)
        self.tokenizer, self.scene, metrics = Tokenizer(directory, 1), scene, scene.metrics
        vocabulary = Vocabulary(self.tokenizer)
        validator = Validator(self.tokenizer, LIMITS, GrammarCompiler(), metrics, scene.handle.info)
        accounting = Accounting(metrics, Tracing(), 0)
        self.service = GenerationService(
            scene.handle, validator, self.tokenizer, lambda *_: vocabulary, accounting
        )

    async def generate(self, text: str) -> str:
        answers = []
        for result in await self.service.generate(read(text, "batch")):
            assert result.last is not None
            answers.append([result.text, result.last.num_generated, result.last.reason.name])
        return json.dumps(answers)

    async def stream(self, text: str) -> AsyncIterator[str]:
        async with self.service.stream(read(text, "stream")) as ((spec, outputs),):
            yield json.dumps(len(spec.input_ids))
            async for output in outputs:
                assert isinstance(output, Output)
                yield json.dumps([output.text, output.num_generated, output.reason.name])

    def expected(self, text: str, length: int) -> tuple[str, int]:
        """Return the model's own text and its number of tokens."""
        tokens: list[int] = self.tokenizer.fast.encode(text).ids
        num_inputs = len(tokens)
        while len(tokens) < num_inputs + length and (len(tokens) == num_inputs or tokens[-1] != EOS):
            tokens.append(next_token(tokens, VOCAB_SIZE))
        generated = self.tokenizer.fast.decode(tokens[num_inputs:])
        return generated.rstrip("\N{REPLACEMENT CHARACTER}"), len(tokens) - num_inputs


def read(text: str, kind: str) -> GenerationCall:
    call = json.loads(text)
    texts = call.pop("texts")
    call["stop_sequences"] = tuple(call.get("stop_sequences", ()))
    return GenerationCall("json", kind, texts, Parameters(**call), lambda: "", (), "a connection", api=FMAAS)


def sum_of(scene: Scene, name: str) -> float:
    """Return the sum of a metric over all labels."""
    lines = scene.metrics.render().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if re.split(r"[ {]", line)[0] == name)


@pytest.fixture(params=[False, True], ids=["local", "split"])
async def served(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[JsonApi]:
    async with open_scene(tmp_path, request.param) as scene:
        served = JsonApi(scene, tmp_path)
        yield served
        assert served.service.is_idle.is_set()
        served.tokenizer.close()


async def test_another_api_has_the_model_s_texts(served: JsonApi) -> None:
    texts = [PROMPT, "girl bread"]
    answers = json.loads(await served.generate(json.dumps({"texts": texts, "max_new_tokens": 30})))
    for text, (generated, num_generated, reason) in zip(texts, answers, strict=True):
        expected, num_expected = served.expected(text, 30)
        assert (generated, num_generated) == (expected, num_expected)
        assert reason == ("MAX_TOKENS" if num_expected == 30 else "EOS_TOKEN")


async def test_parameters_that_one_api_lacks_are_counted(served: JsonApi) -> None:
    every = Parameters(
        logit_bias=((7, -1.0),),
        min_p=0.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        stop_token_ids=(5,),
        ignore_eos=True,
        watermark=True,
        n=2,
        cache_salt=b"salt",
        priority=3,
    )
    call = read(json.dumps({"texts": ["5 6 7"]}), "batch")
    await served.service.generate(call)
    counter = served.scene.metrics.request_parameter_count
    assert counter.values() == {}
    await served.service.generate(replace(call, parameters=every, inputs_are_ids=True))
    await served.service.generate(replace(call, parameters=replace(Parameters(), min_p=0.2)))
    with pytest.raises(RequestError, match="max_new_tokens must be <= 199"):
        await served.service.generate(replace(call, parameters=replace(every, max_new_tokens=200)))
    names = [field.name for field in fields(Parameters) if getattr(every, field.name) != field.default]
    assert len(names) == 10
    assert counter.values() == {(name,): 1 + (name == "min_p") for name in [*names, "input_ids"]}


async def test_another_api_streams_to_a_stop_sequence(served: JsonApi) -> None:
    whole, _ = served.expected(PROMPT, 30)
    stop = whole[len(whole) // 2 :][:3]
    call = {"texts": [PROMPT], "max_new_tokens": 30, "stop_sequences": [stop]}
    first, *parts = [json.loads(part) async for part in served.stream(json.dumps(call))]
    assert first == len(served.tokenizer.fast.encode(PROMPT).ids)
    assert "".join(text for text, _, _ in parts) == whole[: whole.index(stop) + len(stop)]
    numbers = [number for _, number, _ in parts]
    assert numbers == sorted({*numbers}), "each has more tokens than the one before"
    *others, last = [reason for _, _, reason in parts]
    assert last == StopReason.STOP_SEQUENCE.name
    assert set(others) <= {StopReason.NOT_FINISHED.name}


async def test_a_long_answer_that_is_read_late_leaves_turns_to_others(tmp_path: Path) -> None:
    asked = {"texts": [PROMPT], "max_new_tokens": 150, "ignore_eos": True}
    call = read(json.dumps(asked | {"generated_tokens": True, "top_n_tokens": 5}), "stream")
    turn, turns = 0, list[int]()

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async with open_scene(tmp_path, False) as scene, asyncio.timeout(20):
        served = JsonApi(scene, tmp_path)
        async with served.service.stream(call) as ((_, outputs),):
            await anext(outputs)
            await until(lambda: "request" not in scene.left())
            counting = asyncio.create_task(count())
            turns = [turn async for _ in outputs]
            counting.cancel()
        served.tokenizer.close()
    assert len(turns) > 3
    assert turns == sorted(set(turns))


async def test_n_texts_are_those_of_calls_with_the_seeds_that_follow(served: JsonApi) -> None:
    service = served.service
    served.scene.shard.model.uses_seeds = True
    asked = {"texts": [PROMPT, "girl bread"], "max_new_tokens": 30, "sample": True, "seed": 7}
    results = await service.generate(read(json.dumps(asked | {"n": 3}), "batch"))
    digests = [blake2b(pack("<QQ", 7, number), digest_size=8).digest() for number in (1, 2)]
    seeds = [7, *(int.from_bytes(digest, "little") for digest in digests)]
    assert [result.spec.sampling.seed for result in results] == seeds * 2
    texts = [result.text for result in results]
    assert len(set(texts)) == 6
    alone = [
        await service.generate(read(json.dumps(asked | {"texts": [text], "seed": seed}), "batch"))
        for text in asked["texts"]
        for seed in seeds
    ]
    assert texts == [result.text for (result,) in alone]


async def test_n_texts_have_one_input(served: JsonApi, caplog: pytest.LogCaptureFixture) -> None:
    """The input is counted, tokenized and reported once. Each text is counted and logged."""
    caplog.set_level("INFO", "tgis.router.requests.request_log")
    asked = {"texts": ["girl bread", PROMPT], "n": 3, "input_tokens": True, "generated_tokens": True}
    results = await served.service.generate(read(json.dumps(asked), "batch"))
    for text, family in zip(asked["texts"], (results[:3], results[3:]), strict=True):
        ids = served.tokenizer.fast.encode(text).ids
        assert [[token.token_id for token in result.input_tokens] for result in family] == [ids] * 3
        assert len({tuple(result.tokens) for result in family}) == 1
    names = ("input_count", "raw_input_length_count", "input_length_count", "total_tokens_count", "success")
    assert [sum_of(served.scene, f"tgi_request_{name}") for name in names] == [2, 2, 2, 6, 6]
    lines = sorted(record.getMessage().split(" generated")[0] for record in caplog.records)
    assert lines == [f"Sub-request {number} from batch of 6" for number in range(1, 7)]
    shown = [vars(record)[FIELDS]["input_bytes"] for record in caplog.records]
    assert sorted(shown) == [len("girl bread")] * 3 + [len(PROMPT)] * 3


async def test_n_takes_so_many_places_and_has_bounds(served: JsonApi) -> None:
    texts = [PROMPT] * 43
    with pytest.raises(OverloadedError):
        await served.generate(json.dumps({"texts": texts, "n": 3}))
    maximum = {"texts": texts[:42], "n": 3, "max_new_tokens": 1}
    assert len(json.loads(await served.generate(json.dumps(maximum)))) == 126
    for n in (-1, 0, 129, 1 << 70):
        with pytest.raises(RequestError, match="n must be >= 1 and <= 128"):
            await served.generate(json.dumps({"texts": texts[:1], "n": n}))
    assert served.scene.metrics.request_failure.values()[("validation",)] == 4


@pytest.mark.parametrize("late_s", [-1.0, 0.2], ids=["before it is queued", "in the queue"])
async def test_a_call_whose_deadline_has_passed_is_never_computed(tmp_path: Path, late_s: float) -> None:
    """The protocol ends such a call, but possibly later than the calls before it."""
    asked = {"texts": [PROMPT], "max_new_tokens": 150, "min_new_tokens": 150}
    call = read(json.dumps(asked), "batch")
    async with open_scene(tmp_path, False, max_batch_size=1) as scene, asyncio.timeout(20):
        served = JsonApi(scene, tmp_path)
        scene.shard.step_s = 0.02
        prompts = list[list[int]]()
        scene.shard.model.refuses = lambda row: prompts.append(integers(row.token_ids)) is not None
        busy = asyncio.create_task(served.service.generate(call))
        await until(lambda: len(prompts) == 1)
        late = replace(call, texts=["girl bread"], time_left_s=late_s)
        waiting = asyncio.create_task(served.service.generate(late))
        await until(lambda: scene.metrics.resource_counts["request"].created == 2)
        time.sleep(max(late_s, 0))  # noqa: ASYNC251  # the event loop is late
        busy.cancel()
        scene.shard.step_s = 0.001
        await served.service.generate(replace(call, texts=["fox"]))
        assert len(prompts) == 2
        assert prompts[1] == served.tokenizer.fast.encode("fox").ids
        assert not waiting.done(), "the protocol ends it"
        waiting.cancel()
        await asyncio.wait([busy, waiting])
        assert scene.left() == {}
        served.tokenizer.close()


async def test_another_api_s_refusals_are_counted(served: JsonApi) -> None:
    failures = served.scene.metrics.request_failure
    with pytest.raises(RequestError, match="max_new_tokens must be <= 199"):
        await served.generate(json.dumps({"texts": [PROMPT], "max_new_tokens": 200}))
    with pytest.raises(OverloadedError):
        await served.generate(json.dumps({"texts": [PROMPT] * 129}))
    assert (failures.values()[("validation",)], failures.values()[("conc_limit",)]) == (1, 1)
