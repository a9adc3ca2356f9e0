"""Measures the gain of trained speculators on the model that they were trained for: the held-out prompts of
`bench.train_speculator`, to a service with a speculator and to one without, in turns."""

import argparse
import json
import re
import statistics
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from bench.real_model import FILE
from bench.service import BenchError, exit_on_sigterm, launch
from bench.train_speculator import HELD_OUT, make_prompts
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

NEW_TOKENS = 128
TIMEOUT_S = 300.0
ACCEPTED = re.compile(r'^tgi_speculation_accepted_tokens_by_position_total\{position="(\d+)"\} (\S+)$', re.M)
DRAFTS = re.compile(r"^tgi_speculation_drafts_total (\S+)$", re.M)


class Service(NamedTuple):
    stub: GenerationServiceStub
    port: str


def generate(service: Service, prompt: str) -> tuple[str, int]:
    """Return the greedy answer and its number of tokens."""
    params = pb.Parameters(method=pb.GREEDY)
    params.stopping.max_new_tokens = NEW_TOKENS
    batch = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text=prompt)], params=params)
    response = service.stub.Generate(batch, timeout=TIMEOUT_S).responses[0]
    return response.text, response.generated_token_count


def run(service: Service, prompts: list[str], clients: int) -> tuple[float, list[str]]:
    """Return the tokens per second of that many clients, and the texts."""
    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        answers = list(threads.map(lambda prompt: generate(service, prompt), prompts))
    seconds = time.perf_counter() - began
    return sum(count for _, count in answers) / seconds, [text for text, _ in answers]


def read_acceptance(service: Service) -> dict[str, Any]:
    """Return the number of sequences of drafts, and the share in which each position was accepted."""
    with urllib.request.urlopen(f"http://127.0.0.1:{service.port}/metrics") as response:
        text = response.read().decode()
    (drafts,) = DRAFTS.findall(text)
    accepted = sorted((int(position), float(count)) for position, count in ACCEPTED.findall(text))
    shares = [round(count / max(float(drafts), 1), 3) for _, count in accepted]
    return {"drafts": float(drafts), "accepted": shares}


def compare(services: list[Service], prompts: list[str], clients: int, rounds: int) -> dict[str, Any]:
    """Return the median ratio of a service's rate to that of the first one. Raises BenchError."""
    few = prompts if clients > 1 else prompts[:6]
    ratios: list[list[float]] = [[] for _ in services]
    for number in range(rounds + 1):
        results = [run(service, few, clients) for service in services]
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
    parser.add_argument("--log", type=Path, default=Path(".cache/bench"), help="(default %(default)s)")
    parser.add_argument("--option", action="append", default=[], help="further option of the services")
    options = parser.parse_args()
    exit_on_sigterm()
    prompts = make_prompts()[::HELD_OUT][:32]
    with ExitStack() as stack:
        services = []
        for number, path in enumerate([None, *options.speculators]):
            flags = [*options.option, *(["--speculator", str(path.absolute())] if path else [])]
            log = options.log / f"speculator-{number}.log"
            target, command = stack.enter_context(launch(FILE, log, flags))
            channel = stack.enter_context(grpc.insecure_channel(target))
            port = command[command.index("--port") + 1]
            services.append(Service(GenerationServiceStub(channel), port))
        figures: dict[str, Any] = {}
        for clients in (1, 32):
            figures[f"{clients} clients"] = compare(services, prompts, clients, options.rounds)
        figures["accepted by position"] = [read_acceptance(service) for service in services[1:]]
    print(json.dumps({"speculators": [str(path) for path in options.speculators], **figures}, indent=1))


if __name__ == "__main__":
    main()
