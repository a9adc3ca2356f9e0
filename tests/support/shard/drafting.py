"""Drives a model runner with drafts: right and wrong ones of the router, and those of the shard."""

from dataclasses import dataclass, field
from pathlib import Path

from tests.support.shard.driver import Request, Router, configure, opening
from tests.support.shard.messages import integers
from tests.support.shard.relay import Relay, follow, share
from tgis.pb import shard_pb2 as pb
from tgis.shard.collectives import ProcessGroup
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.startup.load import load


@dataclass
class Foreseen(Request):
    truth: list[int] = field(default_factory=list)
    """The tokens that the request will generate."""


class DraftingRouter(Router):
    """Router that proposes right drafts with the chance `luck`, or leaves them to the shard with the chance
    `left_to_shard`.

    A row with drafts is in no later unread step; a row with the shard's drafts is also in no earlier one."""

    def __init__(self, runner: ModelRunner, luck: float, seed: int, left_to_shard: float = 0.0) -> None:
        super().__init__(runner, seed)
        self.luck, self.left_to_shard = luck, left_to_shard
        self.vocab_size = runner.info.vocab_size
        self.busy: dict[int, int] = {}
        """The step with drafts, by row."""
        self.num_guessed = self.num_right = self.num_proposed = 0

    def guess(self, request: Foreseen) -> list[int]:
        room = request.max_new_tokens - len(request.generated) - 1
        if room < 1 or self.rng.random() < 0.2:
            return []
        start = len(request.generated)
        places = range(start, start + self.rng.randint(1, min(room, 6)))
        return [self.guess_one(request.truth[place : place + 1]) for place in places]

    def guess_one(self, truth: list[int]) -> int:
        """Return the true continuation, which is empty after the end, or random tokens."""
        if truth and self.rng.random() <= self.luck:
            return truth[0]
        return (sum(truth) + self.rng.randrange(1, self.vocab_size)) % self.vocab_size

    def send(self, running: list[Request], fresh: list[Request]) -> None:
        work, drafts, limits = [], {}, {}
        for request in running:
            start, known = request.scheduled, len(request.prompt) + len(request.generated)
            if request.row in self.busy or start == request.length:
                continue
            room = len(request.prompt) + request.max_new_tokens - request.length - 1
            if start + 1 == request.length and room > 0 and self.rng.random() < self.left_to_shard:
                limits[request.row] = self.rng.randint(1, min(room, 6))
                self.busy[request.row] = self.steps.step_id + 1
                request.scheduled = request.length
                work.append((request.row, start, request.length))
                continue
            if known < request.length and self.rng.random() < 0.7:
                continue  # a row that waits for its last token before it proposes
            end = self.rng.randint(start + 1, request.length)
            guess = self.guess(request) if start + 1 == known == request.length else []
            if guess:
                drafts[request.row] = guess
                self.busy[request.row] = self.steps.step_id + 1
            elif end == request.length < len(request.prompt) + request.max_new_tokens - 1:
                request.length += 1
            request.scheduled = end
            work.append((request.row, start, end))
        step = self.steps.step(work, [opening(request) for request in fresh], self.closed, drafts, limits)
        self.closed = []
        response = self.runner.launch(step).answer()
        self.num_guessed += sum(map(len, drafts.values()))
        self.num_right += len(response.token_ids) // 4 - len(response.rows) // 4
        self.num_proposed += sum(integers(response.num_drafts))
        self.unread.append(response)

    def read(self, response: pb.StepResponse, running: list[Request]) -> None:
        mine = list(running)
        super().read(response, running)
        for request in mine:
            if request.ended:
                self.busy.pop(request.row, None)
            elif self.busy.get(request.row) == response.step_id:
                del self.busy[request.row]
                request.length = len(request.prompt) + len(request.generated)
                request.scheduled = request.length - 1


def draft_on_rank(
    group: ProcessGroup, directory: Path, speculator: Path, requests: list[Foreseen]
) -> tuple[list[list[int]], list[int]]:
    """Run requests with drafts of the shard. Return their tokens, on the first rank, and the digests of all
    steps."""
    options = {"rank": group.rank, "world_size": group.size, "speculator": str(speculator)}
    return run_on_rank(load(configure(directory, **options), group), group, requests)


def run_on_rank(
    runner: ModelRunner, group: ProcessGroup, requests: list[Foreseen]
) -> tuple[list[list[int]], list[int]]:
    """Run requests like `draft_on_rank` on a rank's runner."""
    if group.rank:
        return [], list(follow(group, runner))
    relay = Relay(runner, group)
    router = DraftingRouter(relay, 1.0, 0, left_to_shard=1.0)  # type: ignore[arg-type]
    router.run([*requests])
    share(group, b"")
    assert router.num_proposed > 50
    return [request.generated for request in requests], relay.digests
