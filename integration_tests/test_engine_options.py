"""Options of the engine on a launched service, all together: reserved output in a small cache, scaled rotary
positions, time limits of tokens, and watermarks for TGI's clients."""

import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
import transformers

from integration_tests.support.greedy_answers import (
    MAX_SEQUENCE_LENGTH,
    VOCAB_SIZE,
    Model,
    check,
    request,
)
from integration_tests.support.service import Client, serve
from tests.support.watermark_detector import score
from tgis.pb import generation_pb2 as pb

pytestmark = pytest.mark.slow

LENGTH = 2 * MAX_SEQUENCE_LENGTH
FLAGS = (
    *("--dtype", "float32", "--reserve-output", "--block-size", "8", "--kv-cache-tokens", str(LENGTH + 128)),
    *("--max-step-tokens", "48", "--rope-scaling", "dynamic", "--rope-factor", "2"),
    *("--max-sequence-length", str(LENGTH), "--kv-cache-memory-fraction", "0.1"),
    *("--max-queue-time", "60", "--priority-floor", "-5", "--tenant-tokens-per-minute", "1000000"),
    *("--first-token-timeout", "60", "--next-token-timeout", "60", "--watermark-delta", "6"),
)
SAMPLE = pb.SAMPLE
Keys = tuple[tuple[str, str], ...]
IDS: Keys = (("tgis-tokens", "ids"),)


@pytest.fixture(scope="module")
def client(model: Model) -> Iterator[Client]:
    yield from serve(model.directory, *FLAGS)


def generate(client: Client, text: str, metadata: Keys = (), **params: object) -> pb.GenerationResponse:
    message = pb.BatchedGenerationRequest(
        requests=[pb.GenerationRequest(text=text)], params=pb.Parameters(**params)
    )
    [response] = client.stub.Generate(message, metadata=metadata).responses
    return response


def ids_of(response: pb.GenerationResponse) -> list[int]:
    return [int(token.text) for token in response.tokens]


def test_excess_concurrent_calls_preempt_no_sequence(client: Client, model: Model) -> None:
    """The responses are transformers': up to the model's length, dynamic scaling changes nothing."""
    with ThreadPoolExecutor(len(model.expected)) as pool:
        answers = [
            pool.submit(generate, client, expected.prompt, **request(expected)) for expected in model.expected
        ]
        for expected, answer in zip(model.expected, answers, strict=True):
            check(expected, answer.result())
    with urllib.request.urlopen(client.service.http + "/metrics", timeout=10) as response:
        text = response.read().decode()
    [preemptions] = re.findall(r"^tgi_preemptions_total(?:{[^}]*})? (.*)$", text, re.MULTILINE)
    assert float(preemptions) == 0
    assert "is more than the model's" not in client.service.output


def test_texts_beyond_the_length_are_those_of_transformers(client: Client, model: Model) -> None:
    """Compute the expected tokens one by one, because the rotation of all tokens of a prompt depends on its
    length."""
    config = transformers.AutoConfig.from_pretrained(model.directory)
    config.rope_parameters |= {"rope_type": "dynamic", "factor": 2.0}
    oracle = transformers.LlamaForCausalLM.from_pretrained(
        model.directory, config=config, dtype=torch.float32
    )
    stopping = pb.StoppingCriteria(max_new_tokens=LENGTH - 40, min_new_tokens=LENGTH - 40)
    asked = {"stopping": stopping, "response": pb.ResponseOptions(generated_tokens=True, input_tokens=True)}
    answer = generate(client, "there was no fox", IDS, **asked)
    ids = [int(token.text) for token in answer.input_tokens] + ids_of(answer)
    cache, num_sure = transformers.DynamicCache(config=config), 0
    with torch.inference_mode():
        for place, (token, following) in enumerate(pairwise(ids)):
            position = torch.tensor([[place]])
            logits = oracle(torch.tensor([[token]]), position_ids=position, past_key_values=cache).logits[
                0, -1
            ]
            logits[1] = -torch.inf  # the end-of-sequence token, which is suppressed so far
            best, second = logits.topk(2).values.tolist()
            if place >= len(answer.input_tokens) - 1 and best - second > 1e-3:
                assert following == int(logits.argmax())
                num_sure += place > MAX_SEQUENCE_LENGTH
    assert num_sure > 50


def test_a_watermark_is_found_in_watermarked_texts_alone(client: Client) -> None:
    decoding = {"method": SAMPLE, "sampling": pb.SamplingParameters(temperature=2.0, seed=7)}
    asked = {
        **decoding,
        "stopping": pb.StoppingCriteria(max_new_tokens=200, min_new_tokens=200),
        "response": pb.ResponseOptions(generated_tokens=True),
    }
    marked = ids_of(generate(client, "the fox", (*IDS, ("tgis-watermark", "true")), **asked))
    plain = ids_of(generate(client, "the fox", IDS, **asked))
    assert score(plain, 0.5, VOCAB_SIZE) < 4 < score(marked, 0.5, VOCAB_SIZE)
