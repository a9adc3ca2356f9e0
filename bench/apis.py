"""`python -m bench.apis`: measure a router process's CPU time per streamed token, by API, in turns in one
run. The shard is a fake that returns random tokens."""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench import api_clients, worker
from bench.api_clients import APIS, ENGINE, GRPC
from bench.contest import Spread, turns
from bench.router_group import RouterService
from bench.service import BenchError, exit_on_sigterm
from bench.worker import Worker
from tests.support.router.fake_shard import FakeShard, ShardServer
from tests.support.router.model_of_shard import column, integers
from tests.support.router.router_process import router_command
from tests.support.tokenizers.trained import write_byte_level
from tgis.pb import shard_pb2 as pb

GOAL = 1.2
WARM_STEPS = 10
SLACK = 60  # maximum tokens of the first streams before the last one starts, and after the last step
STEP_S, GATHER_S = 0.02, 0.2  # minimum time of a step with all streams, and before all have started
VOCAB_SIZE, BLOCK_SIZE, MAX_LENGTH = 400, 16, 1024
ASCII_IDS = (2, 96)  # from "!" to "~" in the tokenizer: every token has text
# With tools, the router parses tool calls, in the format that the comment names.
TEMPLATE = (
    '{# <tool_call> "arguments": #}{{ tools }}{% for message in messages %}{{ message.content }}{% endfor %}'
)
TIME_LIMIT_S = 180.0


@dataclass
class Row:
    length: int
    limit: int


@dataclass(frozen=True)
class Sample:
    """CPU time of the router over some steps with all streams."""

    api: str
    streams: int
    cpu_s: float
    wall_s: float
    tokens: int

    @property
    def token_us(self) -> float:
        return 1e6 * self.cpu_s / self.tokens


class Look(NamedTuple):
    cpu_s: tuple[float, ...]
    """CPU seconds of each watched process."""
    wall_s: float

    def since(self, begin: "Look") -> "Look":
        spent = zip(self.cpu_s, begin.cpu_s, strict=True)
        return Look(tuple(end - begin for end, begin in spent), self.wall_s - begin.wall_s)


class RandomTokens:
    """Fake shard that returns a random token for each row and step, and records the CPU time of processes
    over the steps with all streams, after the warm-up."""

    def __init__(self, is_fast: bool = False) -> None:
        self.is_fast = is_fast
        """True if a step takes no time once all streams have started."""
        self.pids: list[int] = []
        """Processes whose CPU time is recorded."""
        self._random = np.random.default_rng(0)
        self._rows: dict[int, Row] = {}
        self._num_streams = self._num_steps = 0
        self._num_full = self._num_left = 0
        self._begin = self._end = Look((), 0.0)
        """Times at the end of the warm-up, and after the steps."""

    def watch(self, num_streams: int, num_steps: int) -> None:
        self._num_streams, self._num_steps, self._num_full = num_streams, num_steps, 0
        self.num_left = 0

    def result(self) -> Look:
        """Return the CPU times of the steps. Raises BenchError if there were too few steps."""
        if self._num_full <= WARM_STEPS + self._num_steps:
            raise BenchError(f"all streams had {self._num_full} steps together, too few")
        return self._end.since(self._begin)

    def rest(self) -> tuple[Look, int]:
        """Return the CPU times since the end of the warm-up, and the number of tokens generated since then.

        All streams have ended. Raises BenchError if too few steps had all streams."""
        if self._num_full <= WARM_STEPS:
            raise BenchError(f"all streams had {self._num_full} steps together, too few")
        return self._look().since(self._begin), self._num_left

    def execute(self, request: pb.StepRequest) -> pb.StepResponse:
        for number in integers(request.closed_rows):
            del self._rows[number]
        for opened in request.opened_rows:
            length = len(integers(opened.token_ids))
            self._rows[opened.row] = Row(length, opened.prompt_len + opened.max_new_tokens)
        work = zip(integers(request.rows), integers(request.ends), strict=True)
        numbers = [number for number, end in work if self._samples(self._rows[number], end)]
        self._pace(len(numbers))
        for number in numbers:
            self._rows[number].length += 1
        ended = [self._rows[number].length == self._rows[number].limit for number in numbers]
        tokens = self._random.integers(*ASCII_IDS, len(numbers)).tolist()
        return pb.StepResponse(
            step_id=request.step_id, rows=column(numbers), token_ids=column(tokens), ended=bytes(ended)
        )

    def _samples(self, row: Row, end: int) -> bool:
        return end == row.length < row.limit

    def _pace(self, num_rows: int) -> None:
        """Wait for the duration of a step or, before all streams have started, until they can start."""
        is_full = num_rows >= self._num_streams
        if not is_full and self._num_full == 0:
            time.sleep(GATHER_S)
        elif not self.is_fast:
            time.sleep(STEP_S)
        if not is_full:
            return
        if self._num_full == WARM_STEPS:
            self._begin = self._look()
            self._num_left = sum(row.limit - row.length for row in self._rows.values())
        if self._num_full == WARM_STEPS + self._num_steps:
            self._end = self._look()
        self._num_full += 1

    def _look(self) -> Look:
        return Look(tuple(map(cpu_seconds, self.pids)), time.perf_counter())


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process, in nanoseconds; psutil's resolution is 10 ms."""
    return time.clock_gettime(
        ~pid << 3 | 2
    )  # Linux's CPU clock of another process, as in clock_getcpuclockid


class PacedShard(FakeShard):
    def __init__(self, tokens: RandomTokens, num_blocks: int) -> None:
        self._tokens = tokens
        info = pb.InfoResponse(num_blocks=num_blocks, block_size=BLOCK_SIZE, vocab_size=VOCAB_SIZE)
        super().__init__(info=info)
        self.step_s = 0.0

    def _model(self) -> Any:
        return self._tokens


class Bench:
    """Router with its shard and its clients."""

    def __init__(self, router: RouterService, tokens: RandomTokens, clients: Worker) -> None:
        self.router, self._tokens, self._clients = router, tokens, clients

    def measure(self, api: str, num_streams: int, num_steps: int) -> Sample:
        """Start them. Raises BenchError."""
        times = self.watch(api, num_streams, num_steps)
        return Sample(api, num_streams, sum(times.cpu_s), times.wall_s, num_streams * num_steps)

    def watch(self, api: str, num_streams: int, num_steps: int) -> Look:
        """Return the CPU times of steps with all streams. Raises BenchError."""
        self._tokens.watch(num_streams, num_steps)
        self.stream(api, num_streams, SLACK + WARM_STEPS + num_steps)
        return self._tokens.result()

    def stream(self, api: str, num_streams: int, new_tokens: int) -> int:
        """Stream whole texts, and return the number of messages or events. Raises BenchError."""
        question = {"api": api, "streams": num_streams, "new_tokens": new_tokens}
        num_events: int = self._clients.ask(question, TIME_LIMIT_S)["events"]
        return num_events


@contextmanager
def running(
    directory: Path,
    max_streams: int,
    apis: Sequence[str],
    tokens: RandomTokens | None = None,
    tree: Path | None = None,
    num_workers: int = 0,
) -> Iterator[Bench]:
    """Run the router of the checkout `tree`, by default this one. Without workers, the engine runs in the
    router's process. Raises BenchError."""
    write_byte_level(directory, VOCAB_SIZE)
    tokens, uds_path = tokens or RandomTokens(), str(directory / "shard")
    with ExitStack() as stack:
        server = ShardServer(PacedShard(tokens, (max_streams + 1) * MAX_LENGTH // BLOCK_SIZE), uds_path)
        stack.callback(server.stop)
        limits = ["--max-batch-size", str(max_streams), "--max-sequence-length", str(MAX_LENGTH)]
        limits += ["--max-concurrent-requests", str(max_streams), "--shard-uds-path", uds_path]
        if ENGINE in apis:
            limits += ["--grpc-api", "fmaas,vllm-engine"]
        if not set(apis) <= {GRPC, ENGINE}:
            template = directory / "chat.jinja"
            template.write_text(TEMPLATE)
            limits += ["--chat-template", str(template)]
            limits += ["--http-api", "tgi,lmi,openai", "--max-http-connections", str(2 * max_streams)]
        router = RouterService(router_command(directory, *limits), num_workers, tree)
        stack.callback(router.end)
        router.service.wait_until_serving()
        tokens.pids = [*router.routers, *([router.engine] if router.engine else [])]
        clients = worker.start(api_clients.MODULE, router.grpc_target, router.http_target)
        yield Bench(router, tokens, stack.enter_context(clients))


def run(bench: Bench, options: argparse.Namespace) -> list[Sample]:
    """Measure all APIs in turns. Raises BenchError."""
    samples = []
    for num_streams in options.streams:
        for api in options.apis:
            bench.measure(api, num_streams, WARM_STEPS)
        for number in range(options.rounds):
            for api in turns(options.apis, number):
                samples.append(bench.measure(api, num_streams, options.steps))
                print(
                    f"{api}, {num_streams} streams: {samples[-1].token_us:.1f} us",
                    file=sys.stderr,
                    flush=True,
                )
    return samples


def format_samples(samples: Sequence[Sample]) -> str:
    """Return a Markdown table of microseconds per token, and their ratios to gRPC."""
    lines = ["| streams | API | router's CPU time a token, us | x gRPC | goal |", "|---|---|---|---|---|"]
    for num_streams, api in dict.fromkeys((each.streams, each.api) for each in samples):
        times = _times(samples, num_streams, api)
        base = [each for each in samples if each.streams == num_streams and each.api == GRPC]
        ratio, goal = "", ""
        if api != GRPC and base:
            ratio = f"{times.median / _times(samples, num_streams, GRPC).median:.2f}"
            goal = f"<= {GOAL}"
        lines.append(f"| {num_streams} | {api} | {times:.1f} | {ratio} | {goal} |")
    return "\n".join(lines)


def _times(samples: Sequence[Sample], num_streams: int, api: str) -> Spread:
    return Spread.of([each.token_us for each in samples if (each.streams, each.api) == (num_streams, api)])


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.apis", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measurements per figure (default %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=120, help="measured steps per round (default %(default)s)"
    )
    parser.add_argument(
        "--streams", type=_counts, default=[64, 256], help="numbers of streams (default 64,256)"
    )
    parser.add_argument(
        "--apis", type=_apis, default=list(APIS), help=f"APIs to measure (default {','.join(APIS)})"
    )
    return parser.parse_args(arguments)


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _apis(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := set(chosen) - set(APIS):
        raise argparse.ArgumentTypeError(f"{min(unknown)} is none of {','.join(APIS)}")
    return chosen


def main() -> None:
    options = parse_options(sys.argv[1:])
    exit_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="apis-") as directory:
        try:
            with running(Path(directory), max(options.streams), options.apis) as bench:
                samples = run(bench, options)
        except BenchError as error:
            sys.exit(f"error: {error}")
    print(format_samples(samples))


if __name__ == "__main__":
    main()
