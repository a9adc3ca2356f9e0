"""Measures the service and its peers with their defaults, in turns in one run. Weights are bfloat16."""

import contextlib
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import shapes
from bench.contest import Case, Contender, play
from bench.generator import Loaded, load_processes
from bench.peers.catalogue import DEFAULT_PEERS
from bench.peers.report import find_figures
from bench.peers.starting import start_peer
from bench.probe import probing
from bench.rates import list_sizes
from bench.service import BenchError, first_line, launch
from bench.variants import OURS

PREFILLS = (512, 1024)


def measure_defaults(options: Namespace) -> dict[str, Any]:
    """Return figures in the format of `bench.peers`. A peer that fails is reported with the reason. Raises
    BenchError."""
    model = shapes.ensure_checkpoint(options.shape, options.cache)
    failures: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        probe = stack.enter_context(probing())
        contenders: list[Contender] = [stack.enter_context(_serve(options, model))]
        for peer in DEFAULT_PEERS:
            try:
                contenders.append(start_peer(peer, model, options, stack))
            except BenchError as error:
                failures[peer.name] = first_line(error)
        sizes = (options.input_tokens, options.new_tokens)
        cases = [Case("decode", count, *sizes) for count in options.clients]
        cases += [Case("prefill", 1, length, 1) for length in PREFILLS]
        samples = play([(case, contenders) for case in cases], probe, options.rounds)
    return {
        "started": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "shape": f"{options.shape}-defaults",
        "rounds": options.rounds,
        "titles": {OURS: "ours"} | {peer.name: peer.title for peer in DEFAULT_PEERS},
        "figures": find_figures(samples, options.clients, PREFILLS),
        "samples": samples,
        "failures": failures,
    }


@contextlib.contextmanager
def _serve(options: Namespace, model: Path) -> Iterator[Loaded]:
    log = options.cache / "defaults.log"
    flags = [*list_sizes(), *options.launcher]
    with launch(model, log, flags) as (target, _), load_processes() as generator:
        yield Loaded(OURS, generator, target)
