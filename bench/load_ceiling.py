"""`python -m bench.load_ceiling`: measure the CPU time of a load process of `tgis bench` per streamed token,
by API. The router's shard is a fake whose steps are slow, so that each message has one token."""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import api_clients
from bench.apis import RandomTokens, running
from bench.contest import Spread
from bench.generator import Generator, check_answers, closed_loop, load_processes
from bench.report import format_table
from bench.service import BenchError, exit_on_sigterm
from tgis.load.apis.catalogue import HTTP_APIS
from tgis.load.figures import MAX_CPU_SHARE
from tgis.load.workload.conversations import Workload

APIS = {
    "fmaas": api_clients.GRPC,
    "engine": api_clients.ENGINE,
    "completions": api_clients.COMPLETIONS,
    "chat": api_clients.CHAT,
    "tgi": api_clients.TGI,
    "lmi": api_clients.LMI,
}
"""Names of `tgis bench`, and those of the same APIs of the router's benches."""


@dataclass(frozen=True)
class LoadCost:
    api: str
    token_us: float
    """CPU time per token, with the request's own share."""
    message_tokens: float


def measure(generator: Generator, target: str, api: str, streams: int, new_tokens: int) -> LoadCost:
    """Run the streams to their ends. Raises BenchError."""
    workload = Workload(texts=("The quick brown fox",), output_tokens=str(new_tokens))
    run = generator.run(closed_loop(target, workload, streams, api=api))
    check_answers(run.records)
    num_tokens = sum(record.output_tokens for record in run.records)
    num_messages = sum(len(record.arrivals) for record in run.records)
    return LoadCost(api, 1e6 * sum(run.cpu_s) / num_tokens, num_tokens / num_messages)


def format_costs(costs: Sequence[LoadCost]) -> str:
    """Return a Markdown table of medians, with the rate at which a process reports that it is the limit."""
    rows = []
    for api in dict.fromkeys(cost.api for cost in costs):
        chosen = [cost for cost in costs if cost.api == api]
        token_us = Spread.of([cost.token_us for cost in chosen])
        size = statistics.median(cost.message_tokens for cost in chosen)
        rate = MAX_CPU_SHARE * 1e6 / token_us.median
        rows.append([api, f"{token_us:.0f}", f"{size:.2f}", f"{rate:.0f}"])
    head = ("API", "CPU time a token, us", "tokens a message", f"tokens/s at {MAX_CPU_SHARE:.0%} of a core")
    return format_table(head, rows)


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.load_ceiling", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="measurements per figure (default %(default)s)")
    parser.add_argument("--streams", type=int, default=64, help="(default %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=200, help="(default %(default)s)")
    parser.add_argument("--apis", nargs="+", choices=APIS, default=list(APIS))
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> list[LoadCost]:
    """Measure all APIs in turns, after a warm-up. Raises BenchError."""
    tokens, costs = RandomTokens(), list[LoadCost]()
    tokens.watch(0, 0)  # steps do not wait for further streams
    names = [APIS[api] for api in options.apis]
    with (
        tempfile.TemporaryDirectory(prefix="load-ceiling-") as directory,
        running(Path(directory), options.streams, names, tokens) as bench,
        load_processes() as generator,
    ):
        router = bench.router
        for number in range(1 + options.rounds):
            for api in options.apis:
                target = router.http_target if api in HTTP_APIS else router.grpc_target
                cost = measure(generator, target, api, options.streams, options.new_tokens)
                print(cost, file=sys.stderr, flush=True)
                costs += [cost] if number else []
    return costs


def main() -> None:
    options = parse_options(sys.argv[1:])
    exit_on_sigterm()
    try:
        print(format_costs(run(options)))
    except BenchError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
