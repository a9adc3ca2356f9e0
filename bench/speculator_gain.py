"""Measures the gain of trained speculators on the model that they were trained for: the held-out prompts of
`bench.train_speculator`, to a service with a speculator and to one without, in turns."""

import argparse
import json
import re
import statistics
import sys
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from bench.generator import Generator, closed_loop, load_processes
from bench.real_model import FILE
from bench.service import BenchError, exit_on_sigterm, launch
from bench.train_speculator import HELD_OUT, make_prompts
from tgis.load.workload.conversations import Workload

NEW_TOKENS = 128
TIMEOUT_S = 300.0
ACCEPTED = re.compile(r'^tgi_speculation_accepted_tokens_by_position_total\{position="(\d+)"\} (\S+)$', re.M)
DRAFTS = re.compile(r"^tgi_speculation_drafts_total (\S+)$", re.M)


class Service(NamedTuple):
    target: str
    port: str


def run(
    generator: Generator, service: Service, prompts: list[str], clients: int
) -> tuple[float, list[str | None]]:
    """Return the tokens per second of that many clients, and the digests of the greedy texts. Raises
    BenchError."""
    workload = Workload(
        texts=tuple(prompts), output_tokens=str(NEW_TOKENS), unary_share=1.0, may_end_early=True
    )
    sizes = {"num_conversations": len(prompts), "timeout_s": TIMEOUT_S}
    answers = generator.answers(closed_loop(service.target, workload, clients, **sizes))
    num_tokens = sum(answer.output_tokens for answer in answers)
    return num_tokens / max(answer.ended for answer in answers), [answer.digest for answer in answers]


def read_acceptance(service: Service) -> dict[str, Any]:
    """Return the number of sequences of drafts, and the share in which each position was accepted."""
    with urllib.request.urlopen(f"http://127.0.0.1:{service.port}/metrics") as response:
        text = response.read().decode()
    (drafts,) = DRAFTS.findall(text)
    accepted = sorted((int(position), float(count)) for position, count in ACCEPTED.findall(text))
    shares = [round(count / max(float(drafts), 1), 3) for _, count in accepted]
    return {"drafts": float(drafts), "accepted": shares}


def compare(
    generator: Generator, services: list[Service], prompts: list[str], clients: int, rounds: int
) -> dict[str, Any]:
    """Return the median ratio of a service's rate to that of the first one. Raises BenchError."""
    few = prompts if clients > 1 else prompts[:6]
    ratios: list[list[float]] = [[] for _ in services]
    for number in range(rounds + 1):
        results = [run(generator, service, few, clients) for service in services]
        if any(texts != results[0][1] for _, texts in results):
            raise BenchError("a speculator changed a text")
        if number:  # the first round warms up
            for ratio, (rate, _) in zip(ratios, results, strict=True):
                ratio.append(rate / results[0][0])
            print(f"{clients} clients: {[round(rate) for rate, _ in results]}", file=sys.stderr, flush=True)
    return {"ratios": [round(statistics.median(each), 2) for each in ratios[1:]]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.speculator_gain")
    parser.add_argument("speculators", type=Path, nargs="+", help="directories of bench.train_speculator")
    parser.add_argument("--rounds", type=int, default=3, help="(default %(default)s)")
    parser.add_argument("--model", type=Path, default=FILE, help="weights of it (default %(default)s)")
    parser.add_argument("--log", type=Path, default=Path(".cache/bench"), help="(default %(default)s)")
    parser.add_argument("--option", action="append", default=[], help="further option of the services")
    options = parser.parse_args()
    exit_on_sigterm()
    prompts = make_prompts()[::HELD_OUT][:32]
    with ExitStack() as stack:
        services, generator = [], stack.enter_context(load_processes())
        for number, path in enumerate([None, *options.speculators]):
            flags = [*options.option, *(["--speculator", str(path.absolute())] if path else [])]
            log = options.log / f"speculator-{number}.log"
            target, command = stack.enter_context(launch(options.model, log, flags))
            services.append(Service(target, command[command.index("--port") + 1]))
        figures: dict[str, Any] = {}
        for clients in (1, 32):
            figures[f"{clients} clients"] = compare(generator, services, prompts, clients, options.rounds)
        figures["accepted by position"] = [read_acceptance(service) for service in services[1:]]
    print(json.dumps({"speculators": [str(path) for path in options.speculators], **figures}, indent=1))


if __name__ == "__main__":
    main()
