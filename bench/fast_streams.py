"""`python -m bench.fast_streams`: measure a router process whose shard replies at once: tokens per second,
CPU time per token and tokens per message, in turns with another checkout (`--before`)."""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.api_clients import APIS, CHAT, COMPLETIONS, GRPC
from bench.apis import MAX_LENGTH, SLACK, Bench, RandomTokens, running
from bench.contest import Spread, turns
from bench.report import format_table
from bench.service import BenchError, exit_on_sigterm

GOAL = 1.5
AFTER, BEFORE = "this tree", "before"
PROMPT_TOKENS = 24  # at most


@dataclass(frozen=True)
class FastSample:
    """Run of some streams to their ends, after the warm-up."""

    tree: str
    api: str
    streams: int
    round: int
    token_us: float
    """CPU time of the router."""
    rate: float
    """Tokens per second."""
    message_tokens: float
    """Tokens per message, or per event in APIs with one token per event."""


class Contender:
    def __init__(self, name: str, bench: Bench, tokens: RandomTokens) -> None:
        self.name, self._bench, self._tokens = name, bench, tokens

    def warm_up(self, api: str, num_streams: int) -> None:
        """Run the streams. Raises BenchError."""
        self._tokens.watch(num_streams, 0)
        self._bench.stream(api, num_streams, SLACK)

    def measure(self, api: str, num_streams: int, new_tokens: int, number: int) -> FastSample:
        """Measure one API. Raises BenchError."""
        self._tokens.watch(num_streams, 0)
        num_messages = self._bench.stream(api, num_streams, new_tokens)
        times, num_tokens = self._tokens.rest()
        return FastSample(
            self.name,
            api,
            num_streams,
            number,
            1e6 * sum(times.cpu_s) / num_tokens,
            num_tokens / times.wall_s,
            num_streams * new_tokens / num_messages,
        )


def run(contenders: Sequence[Contender], options: argparse.Namespace) -> list[FastSample]:
    """Measure all checkouts in turns. Raises BenchError."""
    samples = []
    for num_streams in options.streams:
        for api in options.apis:
            for contender in contenders:
                contender.warm_up(api, num_streams)
            for number in range(options.rounds):
                for contender in turns(contenders, number):
                    samples.append(contender.measure(api, num_streams, options.new_tokens, number))
                    print(samples[-1], file=sys.stderr, flush=True)
    return samples


def format_samples(samples: Sequence[FastSample]) -> str:
    """Return a Markdown table of medians. Ratios to the other checkout are computed per round."""
    head = (
        *("streams", "API", "tree", "tokens/s", "CPU time a token, us", "tokens a message"),
        "tokens/s x before",
    )
    rows = []
    for streams, api, tree in dict.fromkeys((each.streams, each.api, each.tree) for each in samples):
        chosen = [each for each in samples if (each.streams, each.api, each.tree) == (streams, api, tree)]
        rate, cpu, size = (
            statistics.median(values)
            for values in zip(
                *((each.rate, each.token_us, each.message_tokens) for each in chosen), strict=True
            )
        )
        cells = (f"{rate:.0f}", f"{cpu:.1f}", f"{size:.1f}", _ratio(samples, chosen))
        rows.append([str(streams), api, tree, *cells])
    return format_table(head, rows)


def _ratio(samples: Sequence[FastSample], chosen: Sequence[FastSample]) -> str:
    before = {(each.streams, each.api, each.round): each.rate for each in samples if each.tree == BEFORE}
    if chosen[0].tree == BEFORE or not before:
        return ""
    return f"{Spread.of([each.rate / before[each.streams, each.api, each.round] for each in chosen]):.2f}"


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.fast_streams", description=__doc__)
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--rounds", type=int, default=3, help="measurements per figure (default %(default)s)")
    parser.add_argument(
        "--new-tokens", type=int, default=600, help="new tokens per stream (default %(default)s)"
    )
    parser.add_argument(
        "--streams", type=int, nargs="+", default=[64, 256], help="numbers of streams (default 64 256)"
    )
    parser.add_argument("--apis", nargs="+", choices=APIS, default=[GRPC, COMPLETIONS, CHAT])
    options = parser.parse_args(arguments)
    if not SLACK < options.new_tokens <= MAX_LENGTH - PROMPT_TOKENS:
        parser.error(f"--new-tokens must be more than {SLACK} and at most {MAX_LENGTH - PROMPT_TOKENS}")
    return options


def main() -> None:
    options = parse_options(sys.argv[1:])
    exit_on_sigterm()
    trees: Mapping[str, Path | None] = {AFTER: None}
    if options.before is not None:
        trees = {BEFORE: options.before, AFTER: None}
    try:
        with ExitStack() as stack:
            contenders = []
            for name, tree in trees.items():
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fast-streams-")))
                tokens = RandomTokens(is_fast=True)
                bench = running(directory, max(options.streams), options.apis, tokens, tree)
                contenders.append(Contender(name, stack.enter_context(bench), tokens))
            print(format_samples(run(contenders, options)))
    except BenchError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
