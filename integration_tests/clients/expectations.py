"""What clients are told of a launched service. Needs no package: every client's environment imports it."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TGI_REASONS = {"stop": "eos_token", "length": "length"}
"""What TGI and LMI call OpenAI's reasons, of texts that no stop sequence ends."""


@dataclass(frozen=True)
class Completion:
    """transformers' greedy continuation of a prompt."""

    prompt: str
    ids: list[int]
    """The prompt's, with the special tokens that begin it."""
    max_tokens: int
    text: str
    output_ids: list[int]
    """The end of sequence too, if it ends the text."""
    prompt_logprobs: list[float]
    """Of the prompt's tokens after the first."""
    logprobs: list[float]
    finish_reason: str


@dataclass(frozen=True)
class ChatAnswer:
    messages: list[dict[str, Any]]
    prompt: str
    """As transformers renders the chat; it has all its special tokens."""
    answer: Completion
    """Continuation of that prompt."""


@dataclass(frozen=True)
class Served:
    base_url: str
    """Ends with /v1."""
    api_key: str
    model: str
    directory: str
    """Where the model is."""
    max_sequence_length: int
    completions: list[Completion]
    chats: list[ChatAnswer]

    @property
    def root(self) -> str:
        """URL of the APIs that are not OpenAI's; ends without a slash."""
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
    """Run each check with the service that the first argument's file describes. The first failure ends it."""
    served = read_served(Path(sys.argv[1]))
    for check in checks:
        check(served)
        print("  ok", check.__name__.replace("_", " "), flush=True)


def is_close(given: Sequence[float | None], wanted: Sequence[float], tolerance: float = 1e-3) -> bool:
    """Return True if the log-probabilities are equal but for what float32 and another order of sums make."""
    return len(given) == len(wanted) and all(
        one is not None and abs(one - other) <= tolerance for one, other in zip(given, wanted, strict=True)
    )
