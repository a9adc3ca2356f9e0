"""Drives a model runner like the router: without knowledge of unanswered steps."""

import math
import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.support.shard.messages import (
    GREEDY,
    Steps,
    floats,
    integers,
    open_row,
    pack,
    rows_of_tokens,
    top_tokens,
)
from tgis.config.processes import ShardConfig
from tgis.pb import shard_pb2 as pb
from tgis.shard.runner.interface import ModelRunner, Pending


def configure(path: Path, **options: Any) -> ShardConfig:
    small = {"max_batch_size": 8, "max_sequence_length": 192, "cpu_threads": 1}
    # The default depends on the processor, but tests must not.
    small["cpu_arithmetic"] = "float32"
    return ShardConfig(model_path=str(path), **{"uds_path": "unused", **small, **options})


@dataclass
class Request:
    prompt: list[int]
    max_new_tokens: int = 12
    eos: list[int] = field(default_factory=list)
    sampling: dict[str, Any] = field(default_factory=lambda: GREEDY)
    details: dict[str, Any] = field(default_factory=dict)
    grammar: str | None = None
    encoder_token_ids: list[int] = field(default_factory=list)
    """Input of an encoder-decoder model, whose prompt is its start token."""
    cross_blocks: list[int] = field(default_factory=list)
    is_encoded: bool = False
    prompt_digest: str = ""
    """Digest of a soft prompt, whose tokens begin `prompt` and `encoder_token_ids`."""
    adapter_digest: str = ""
    generated: list[int] = field(default_factory=list)
    """Tokens known to the router; a resumed request begins with some."""
    row: int = -1
    scheduled: int = 0
    length: int = 0
    """Number of tokens in the shard after all sent steps."""
    ended: bool = False
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)


def opening(request: Request) -> pb.OpenRow:
    message = open_row(
        request.row,
        request.prompt + request.generated,
        prompt_len=len(request.prompt),
        max_new_tokens=request.max_new_tokens,
        eos=request.eos,
        sampling=request.sampling,
        **request.details,
    )
    message.encoder_token_ids = pack(request.encoder_token_ids)
    message.state_slot, message.state_source = request.row, -1
    message.cross_blocks = pack(request.cross_blocks)
    message.is_encoded = request.is_encoded
    message.prompt_digest, message.adapter_digest = request.prompt_digest, request.adapter_digest
    if request.grammar is not None:
        message.grammar.text = message.grammar.digest = request.grammar
    return message


class Router:
    """Router that runs requests with random prompt chunks and `depth` unanswered steps, without knowledge of
    their answers."""

    def __init__(self, runner: ModelRunner, seed: int = 0, depth: int = 2, whole: bool = False) -> None:
        self.runner, self.rng, self.depth, self.whole = runner, random.Random(seed), depth, whole
        self.steps = Steps(runner.info.block_size, runner.info.num_blocks)
        self.rows = list(range(8))
        self.pending: deque[Pending] = deque()
        self.unread: list[pb.StepResponse] = []
        self.closed: list[int] = []
        self.responses: list[pb.StepResponse] = []
        self.crossed: dict[int, Request] = {}
        """Rows with blocks of their encoder output, which rows with the same input share."""

    def run(self, waiting: list[Request], stop_after: int = 10**9) -> None:
        running: list[Request] = []
        while (waiting or running) and stop_after > 0:
            stop_after -= 1
            fresh = []
            while waiting and self.rows and self.rng.random() < 0.7:
                request = waiting.pop(0)
                request.row, request.scheduled = self.rows.pop(), 0
                request.length = len(request.prompt) + len(request.generated)
                self.reserve(request)
                fresh.append(request)
            running += fresh
            self.send(running, fresh)
            if len(self.unread) + len(self.pending) >= self.depth:
                self.read_oldest(running)
        while self.unread or self.pending:
            self.read_oldest(running)

    def reserve(self, request: Request) -> None:
        token_ids, root = request.encoder_token_ids, (request.prompt_digest, request.adapter_digest)
        alike = [
            other
            for other in self.crossed.values()
            if other.encoder_token_ids == token_ids and (other.prompt_digest, other.adapter_digest) == root
        ]
        request.is_encoded = bool(token_ids and alike)
        if request.is_encoded:
            request.cross_blocks = alike[0].cross_blocks
        else:
            num_blocks = -(-len(token_ids) // self.runner.info.block_size)
            request.cross_blocks = [self.steps.free.pop() for _ in range(num_blocks)]
        self.crossed[request.row] = request

    def release(self, row: int) -> None:
        request = self.crossed.pop(row)
        if not any(other.cross_blocks is request.cross_blocks for other in self.crossed.values()):
            self.steps.free += request.cross_blocks

    def send(self, running: list[Request], fresh: list[Request]) -> None:
        work = []
        for request in running:
            if request.scheduled < request.length:
                end = (
                    request.length if self.whole else self.rng.randint(request.scheduled + 1, request.length)
                )
                work.append((request.row, request.scheduled, end))
                request.scheduled = end
                limit = len(request.prompt) + request.max_new_tokens
                if end == request.length and request.length + 1 < limit:
                    request.length += 1
        step = self.steps.step(work, [opening(request) for request in fresh], self.closed)
        self.closed = []
        if len(self.pending) == self.runner.max_pending:
            self.unread.append(self.pending.popleft().answer())
        self.pending.append(self.runner.launch(step))

    def read_oldest(self, running: list[Request]) -> None:
        self.read(self.unread.pop(0) if self.unread else self.pending.popleft().answer(), running)

    def read(self, response: pb.StepResponse, running: list[Request]) -> None:
        self.responses.append(response)
        assert not response.errors
        owners = {request.row: request for request in running}
        rows, tokens = rows_of_tokens(response), integers(response.token_ids)
        logprobs = floats(response.logprobs) or [math.nan] * len(rows)
        ranks = integers(response.ranks) or [0] * len(rows)
        tops = top_tokens(response.top_tokens) or [[]] * len(rows)
        columns = (rows, tokens, logprobs, ranks, tops)
        for (row, ended), token, logprob, rank, top in zip(*columns, strict=True):
            request = owners[row]
            assert not request.ended
            request.generated.append(token)
            request.logprobs.append(logprob)
            request.ranks.append(rank)
            request.tops.append(top)
            if ended:
                request.ended = True
                running.remove(request)
                self.rows.append(row)
                self.closed.append(row)
                self.release(row)


def check_company(runner: ModelRunner) -> list[Request]:
    """Check that requests get the same answers together, in chunks and on all threads, as alone, with whole
    prompts and on one thread. Return the requests that ran together."""
    together = [Request(prompt, 8, details={"logprobs": True}) for prompt in prompts(3, 6)]
    alone = [Request(list(request.prompt), 8, details={"logprobs": True}) for request in together]
    Router(runner, seed=1).run(list(together))
    torch.set_num_threads(1)
    for request in alone:
        runner.reset()
        Router(runner, seed=2, whole=True).run([request])
    assert [(r.generated, r.logprobs) for r in alone] == [(r.generated, r.logprobs) for r in together]
    return together


def prompts(seed: int, count: int, longest: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 99) for _ in range(rng.randint(1, longest))] for _ in range(count)]
