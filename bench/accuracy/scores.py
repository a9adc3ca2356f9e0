"""Reads the log-probabilities of texts' tokens from a service, and keeps them in a file, so that a
measurement resumes after the last finished text."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc

from bench.service import BenchError, launch
from tgis.load.apis.fmaas import CHANNEL_OPTIONS
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

TIMEOUT_S = 600.0
PARAMETERS = pb.Parameters(
    stopping=pb.StoppingCriteria(max_new_tokens=1),
    response=pb.ResponseOptions(input_tokens=True, token_logprobs=True, top_n_tokens=1),
)
# One text at a time needs no larger steps or cache. Neither changes the result.
SMALL = ("--max-batch-size", "1", "--max-step-tokens", "512", "--kv-cache-tokens", "4096")
OPTIONS = (*SMALL, "--max-sequence-length", "2048", "--no-quantize-check", "--cpu-threads", "1")


@dataclass(frozen=True)
class Scores:
    """What a service reports about the tokens of one text, except the first."""

    tokens: list[str]
    logprobs: list[float]
    likeliest: list[str]
    """The likeliest token at each position."""


def read_scores(path: Path) -> list[Scores]:
    """Return the scores of the texts that are finished."""
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [Scores(**json.loads(line)) for line in lines if line.endswith("}\n")]


def score(model: Path, flags: Sequence[str], texts: Sequence[str], path: Path, seconds: float) -> None:
    """Append the scores of the texts that `path` does not have yet, in order, until the time is over; at
    least one. Raises BenchError."""
    finished = read_scores(path)
    if len(finished) >= len(texts):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(map(_format, finished)))  # without a line that was interrupted
    with launch(model, path.with_suffix(".log"), [*OPTIONS, *flags]) as (target, _), path.open("a") as file:
        end = time.monotonic() + seconds
        for text in texts[len(finished) :]:
            file.write(_format(ask(target, text)))
            file.flush()
            if time.monotonic() > end:
                break


def ask(target: str, text: str) -> Scores:
    """Return the scores of a text. Raises BenchError."""
    request = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text=text)], params=PARAMETERS)
    with grpc.insecure_channel(target, CHANNEL_OPTIONS) as channel:
        try:
            answer = GenerationServiceStub(channel).Generate(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise BenchError(f"the service did not answer: {error.code().name}: {error.details()}") from None
    tokens = answer.responses[0].input_tokens[1:]
    return Scores(
        [token.text for token in tokens],
        [round(token.logprob, 6) for token in tokens],
        [token.top_tokens[0].text for token in tokens],
    )


def _format(scores: Scores) -> str:
    return json.dumps(asdict(scores)) + "\n"
