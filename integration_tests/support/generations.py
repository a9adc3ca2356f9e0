"""Sends unary and streamed generations of one prompt, and compares them."""

from itertools import chain

import pytest

from integration_tests.support.greedy_answers import Expected, request
from integration_tests.support.service import Client
from tests.support.streams import join_stream
from tgis.pb import generation_pb2 as pb

Keys = tuple[tuple[str, str], ...]

ONLY_IN_METADATA: tuple[Keys, ...] = (
    (("tgis-logit-bias", "40:2.5,77:-100,120:0.75,9:1e-3"),),
    (("tgis-presence-penalty", "1.5"),),
    (("tgis-frequency-penalty", "0.6"),),
    (("tgis-min-p", "0.05"),),
    (("tgis-watermark", "true"),),
    (("tgis-stop-token-ids", ",".join(map(str, range(300, 340)))),),
    (("tgis-ignore-eos", "true"),),
)


def metadata_with(i: int) -> Keys:
    """Return the i-th choice of parameters that only metadata can set: none, each alone, all together."""
    every = tuple(chain.from_iterable(ONLY_IN_METADATA))
    return ((), *ONLY_IN_METADATA, every)[i % (len(ONLY_IN_METADATA) + 2)]


def unary(client: Client, expected: Expected, metadata: Keys = (), **params: object) -> pb.GenerationResponse:
    message = pb.BatchedGenerationRequest(
        requests=[pb.GenerationRequest(text=expected.prompt)],
        params=pb.Parameters(**request(expected, **params)),
    )
    [response] = client.stub.Generate(message, metadata=metadata).responses
    return response


def streamed(
    client: Client, expected: Expected, metadata: Keys = (), **params: object
) -> pb.GenerationResponse:
    message = pb.SingleGenerationRequest(
        request=pb.GenerationRequest(text=expected.prompt),
        params=pb.Parameters(**request(expected, **params)),
    )
    return join_stream(client.stub.GenerateStream(message, metadata=metadata))


def sampled_with(i: int) -> dict[str, object]:
    """Return the i-th choice of sampling parameters: every limit and penalty, alone and together."""
    limits = [{}, {"top_k": 40}, {"top_p": 0.9}, {"typical_p": 0.8}, {"top_k": 90, "top_p": 0.95}]
    sampling = pb.SamplingParameters(seed=1000 + i, temperature=0.7 + 0.05 * i, **limits[i % 5])
    decoding = pb.DecodingParameters(repetition_penalty=(0, 1.2)[i % 2])
    if i % 3 == 0:
        decoding.length_penalty.start_index, decoding.length_penalty.decay_factor = 4, 1.3
    criteria = pb.StoppingCriteria(max_new_tokens=40, min_new_tokens=(0, 30)[i % 4 == 1])
    return {"method": pb.SAMPLE, "sampling": sampling, "decoding": decoding, "stopping": criteria}


def assert_same(one: pb.GenerationResponse, other: pb.GenerationResponse, tolerance: float) -> None:
    """Compare all fields; log-probabilities may differ by the tolerance, and then also the order of close
    ones."""
    given, wanted = pb.GenerationResponse(), pb.GenerationResponse()
    given.CopyFrom(one)
    wanted.CopyFrom(other)
    if tolerance:
        for info in [info for r in (given, wanted) for info in (*r.tokens, *r.input_tokens)]:
            info.ClearField("rank")
            info.ClearField("top_tokens")
    numbers = [cut_logprobs(response) for response in (given, wanted)]
    assert given == wanted
    assert numbers[0] == pytest.approx(numbers[1], abs=tolerance, rel=0, nan_ok=True)


def cut_logprobs(response: pb.GenerationResponse) -> list[float]:
    infos = [*response.tokens, *response.input_tokens]
    holders = [*infos, *(top for info in infos for top in info.top_tokens)]
    logprobs = [holder.logprob for holder in holders]
    for holder in holders:
        holder.ClearField("logprob")
    return logprobs
