"""Expected responses of a launched service. It needs no package, because every client's environment imports
it."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TGI_REASONS = {"stop": "eos_token", "length": "length"}
"""TGI's and LMI's names of OpenAI's finish reasons, for texts without stop sequences."""


@dataclass(frozen=True)
class Completion:
    """transformers' greedy continuation of a prompt."""

    prompt: str
    ids: list[int]
    """Ids of the prompt, with its leading special tokens."""
    max_tokens: int
    text: str
    output_ids: list[int]
    """Ids of the continuation, with the end-of-sequence token if there is one."""
    prompt_logprobs: list[float]
    """Log-probabilities of the prompt's tokens after the first."""
    logprobs: list[float]
    finish_reason: str


@dataclass(frozen=True)
class ChatAnswer:
    messages: list[dict[str, Any]]
    prompt: str
    """Prompt rendered by transformers, with all special tokens."""
    answer: Completion
    """Continuation of that prompt."""


@dataclass(frozen=True)
class Served:
    base_url: str
    """URL that ends with /v1."""
    api_key: str
    model: str
    directory: str
    """Directory of the model."""
    max_sequence_length: int
    completions: list[Completion]
    chats: list[ChatAnswer]
    grpc_target: str = ""
    """Host and port of the gRPC API."""

    @property
    def root(self) -> str:
        """URL of the other APIs, without a slash at its end."""
        return self.base_url.removesuffix("/v1")

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"}

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def read_served(path: Path) -> Served:
    fields = json.loads(path.read_text())
    fields["completions"] = [Completion(**item) for item in fields["completions"]]
    fields["chats"] = [
        ChatAnswer(item["messages"], item["prompt"], Completion(**item["answer"])) for item in fields["chats"]
    ]
    return Served(**fields)


Check = Callable[[Served], None]


def run(checks: Sequence[Check]) -> None:
    """Run each check with the service described by the first argument's file. The first failure ends the
    run."""
    served = read_served(Path(sys.argv[1]))
    for check in checks:
        check(served)
        print("  ok", check.__name__.replace("_", " "), flush=True)


def is_close(given: Sequence[float | None], wanted: Sequence[float], tolerance: float = 1e-3) -> bool:
    """Return True if the log-probabilities are equal up to float32 rounding and the order of sums."""
    return len(given) == len(wanted) and all(
        one is not None and abs(one - other) <= tolerance for one, other in zip(given, wanted, strict=True)
    )
