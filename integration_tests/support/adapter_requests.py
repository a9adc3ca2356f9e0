"""Requests with soft prompts and adapters, and their expected responses."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from integration_tests.support import oracle, scorer
from integration_tests.support.compare import differences
from integration_tests.support.served_models import Served
from integration_tests.support.service import Client
from tgis.pb import generation_pb2 as pb

NUM_TOKENS = 8
DETAILS = pb.ResponseOptions(generated_tokens=True, token_logprobs=True, token_ranks=True)
INPUTS = pb.ResponseOptions(generated_tokens=True, input_tokens=True, token_logprobs=True, top_n_tokens=2)
TEXTS = [
    "Once upon a time there was a little girl who had",
    "The quick brown fox",
    "who had no bread",
    "Once upon a time there was a little fox",
]
INVALID = grpc.StatusCode.INVALID_ARGUMENT
SLOW_DISK = "shard.before_find[id=on-a-slow-disk]=sleep:8"
"""Failpoint for a prompt whose lookup takes longer than a request waits."""


@dataclass(frozen=True)
class Tuned:
    """Launch a service on two ranks with soft prompts and adapters, only a few of which can be loaded at a
    time."""

    client: Client
    served: Served
    oracle: oracle.Oracle

    @property
    def prompts(self) -> Path:
        return Path(self.served.flags[1])

    @property
    def adapters(self) -> Path:
        return Path(self.served.flags[3])


@dataclass(frozen=True)
class Ask:
    """Request, and the ids by which the oracle computes its response."""

    text: str
    prefix_id: str = ""
    adapter_id: str = ""
    num_tokens: int = NUM_TOKENS
    wants_inputs: bool = False

    @property
    def params(self) -> pb.Parameters:
        stopping = pb.StoppingCriteria(max_new_tokens=self.num_tokens, min_new_tokens=self.num_tokens)
        return pb.Parameters(stopping=stopping, response=INPUTS if self.wants_inputs else DETAILS)

    def send(self, tuned: Tuned) -> pb.GenerationResponse:
        ids = {"prefix_id": self.prefix_id or None, "adapter_id": self.adapter_id or None}
        message = pb.BatchedGenerationRequest(
            requests=[pb.GenerationRequest(text=self.text)], params=self.params, **ids
        )
        [answer] = tuned.client.stub.Generate(message, timeout=60).responses
        return answer

    def stream(self, tuned: Tuned) -> list[pb.GenerationResponse]:
        return list(self.start(tuned))

    def start(self, tuned: Tuned) -> Iterator[pb.GenerationResponse]:
        ids = {"prefix_id": self.prefix_id or None, "adapter_id": self.adapter_id or None}
        request = pb.GenerationRequest(text=self.text)
        message = pb.SingleGenerationRequest(request=request, params=self.params, **ids)
        return tuned.client.stub.GenerateStream(message, timeout=120)

    def refusal(self, tuned: Tuned) -> tuple[grpc.StatusCode, str]:
        """Expected error of the request; None: it succeeds."""
        with pytest.raises(grpc.RpcError) as caught:
            self.send(tuned)
        return caught.value.code(), caught.value.details()

    def check(self, tuned: Tuned, answer: pb.GenerationResponse | list[pb.GenerationResponse]) -> None:
        adapters = scorer.Tuned(self.prefix_id, self.adapter_id)
        if isinstance(answer, list):
            expected = tuned.oracle.stream(self.text, self.params, 0, answer, adapters)
            assert len(expected) == len(answer)
            problems = [d for pair in zip(expected, answer, strict=True) for d in differences(*pair)]
        else:
            problems = list(differences(tuned.oracle.unary(self.text, self.params, 0, adapters), answer))
        assert not problems, (self, problems)


def asks() -> list[Ask]:
    """Return requests with every prompt and every adapter, combined and not, with equal and different
    texts."""
    ids = [
        ("", ""),
        ("eight", ""),
        ("peft.v1", ""),
        ("hundred", ""),
        ("", "mlp"),
        ("", "lora"),
        ("", "nested/all.v2"),
        ("eight", "mlp"),
        ("eight", "nested/all.v2"),
    ]
    return [Ask(text, *pair) for i, pair in enumerate(ids) for text in (TEXTS[0], TEXTS[1 + i % 3])]
