"""Starts the programs of peers."""

import contextlib
import sys
from argparse import Namespace
from pathlib import Path

from bench import worker
from bench.contest import Asked, Contender
from bench.generator import COMPLETIONS, Loaded, load_processes
from bench.peers import environments
from bench.peers.catalogue import Peer

START_TIMEOUT_S = 300.0


def start_peer(peer: Peer, model: Path, options: Namespace, stack: contextlib.ExitStack) -> Contender:
    """Return the contender, ready to be measured. Raises BenchError."""
    python = sys.executable
    if peer.environment is not None:
        python = str(environments.ensure(peer.environment, options.peers).absolute())
    options.peers.mkdir(parents=True, exist_ok=True)
    arguments = peer.arguments(model, options.peers)
    log = options.peers / f"{peer.name}.log"
    starting = worker.start(peer.module, *arguments, python=python, log=log, env=peer.variables())
    child = stack.enter_context(starting)
    if peer.is_server:
        target = child.ask({}, START_TIMEOUT_S)["target"]
        return Loaded(peer.name, stack.enter_context(load_processes()), target, COMPLETIONS)
    child.ask({"batch": 1, "input_tokens": 16, "new_tokens": 2, "seed": 0}, START_TIMEOUT_S)
    return Asked(peer.name, child)
