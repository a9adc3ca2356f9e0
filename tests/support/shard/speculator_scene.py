"""A model with requests and their outputs, which speculators must not change."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.shard.checkpoints import write_llama
from tests.support.shard.drafting import DraftingRouter, Foreseen
from tests.support.shard.driver import Request, Router, configure, prompts
from tests.support.shard.messages import EVERY_PARAMETER, GREEDY, SAMPLE
from tests.support.shard.speculators import Heads, Text, make_medusa, make_mlp, read_texts
from tests.support.tokenizers.trained import write_byte_level
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.runner.row_table import Integers, TokenIds
from tgis.shard.startup.load import load
from tgis.shard.startup.platforms.interface import Platform

VOCAB_SIZE = 403
EOS = 1
EVERYTHING = {"logprobs": True, "ranks": True, "top_n": 3}
SAMPLINGS: list[dict[str, Any]] = [
    GREEDY,
    {**GREEDY, "repetition_penalty": 1.6},
    SAMPLE,
    {**SAMPLE, "top_k": 5, "temperature": 0.5},
    EVERY_PARAMETER,
]
DETAILS: list[dict[str, Any]] = [{}, EVERYTHING, {**EVERYTHING, "raw": True}]
GRAMMAR = '%llguidance {"no_forcing": true}\nstart: /([a-c]{1,3} ){2,9}\\./'


Proposals = Sequence[tuple[list[int], list[int]]]
"""Known tokens, and the proposed ones."""


class Base(NamedTuple):
    """Model, requests with their outputs, and their texts with states."""

    directory: Path
    requests: list[Request]
    texts: list[Text]


def make_requests() -> list[Foreseen]:
    rng = random.Random(5)
    requests = []
    for i, prompt in enumerate(prompts(5, 20, longest=30)):
        sampling = {**SAMPLINGS[i % len(SAMPLINGS)]}
        if not sampling["greedy"]:
            sampling["seed"] = rng.getrandbits(64)
        grammar = GRAMMAR if i % 7 == 3 else None
        requests.append(Foreseen(prompt, rng.randint(8, 30), [EOS], sampling, DETAILS[i % 3], grammar))
    return requests


def write_base(directory: Path, on: Platform | None = None, **overrides: Any) -> Base:
    """Write the model, and compute outputs on a platform. `overrides` are options of its configuration."""
    write_llama(directory, vocab_size=VOCAB_SIZE, hidden_size=64, eos_token_id=EOS, **overrides)
    write_byte_level(directory, 400)
    requests: list[Request] = [*make_requests()]
    Router(load(configure(directory), on=on), 3).run(list(requests))
    return Base(directory, requests, read_texts(directory, [r.prompt + r.generated for r in requests]))


HEADS: dict[str, Callable[[Base], Heads]] = {
    "mlp": lambda base: make_mlp(base.texts, VOCAB_SIZE),
    "mlp_tied_scaled": lambda base: make_mlp(base.texts, VOCAB_SIZE, True, True, 4, prefix=""),
    "medusa": lambda base: make_medusa(base.texts, VOCAB_SIZE),
}
"""Speculators that keep no state of rows."""


def check_proposals(base: Base, heads: Heads, proposals: Proposals) -> None:
    """Check proposals for known tokens, which must begin one of the model's texts."""
    for known, proposed in proposals:
        if proposed:
            (text, *_) = (text for text in base.texts if text.token_ids[: len(known)] == known)
            assert proposed == heads.propose(text.states[len(known) - 2], known[-1], len(proposed))


class Recorder:
    """Proposer that records what the runner's own one proposes for known tokens."""

    def __init__(self, runner: Any) -> None:
        proposer = runner._builder._proposer
        assert proposer is not None
        self._proposer = proposer
        self.proposed: list[tuple[list[int], list[int]]] = []
        runner._builder._proposer = self

    def propose(self, rows: Integers, token_ids: Sequence[TokenIds], max_drafts: Integers) -> list[TokenIds]:
        proposed = self._proposer.propose(rows, token_ids, max_drafts)
        for known, ids, limit in zip(token_ids, proposed, max_drafts.tolist(), strict=True):
            assert len(ids) <= limit
            self.proposed.append((known.tolist(), ids.tolist()))
        return proposed


def check_outputs(runner: ModelRunner, base: Base, seed: int = 0, tolerance: float = 0.0) -> DraftingRouter:
    """Check that requests get the outputs that they get without drafts. Log-probabilities may differ by the
    tolerance."""
    runner.reset()
    requests = make_requests()
    router = DraftingRouter(runner, 1.0, seed, left_to_shard=1.0)
    router.run([*requests])
    for request, plain in zip(requests, base.requests, strict=True):
        assert (request.generated, request.ranks) == (plain.generated, plain.ranks)
        tops, expected = (
            {(at, token): score for at, top in enumerate(each.tops) for token, score in top}
            for each in (request, plain)
        )
        assert tops.keys() == expected.keys()
        scores = [(score, expected[key]) for key, score in tops.items()]
        if request.details:
            scores += zip(request.logprobs, plain.logprobs, strict=True)
        assert all(abs(score - other) <= tolerance for score, other in scores)
    assert router.num_proposed > 50
    return router
