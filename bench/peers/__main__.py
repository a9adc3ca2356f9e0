"""`python -m bench.peers`: measure the service and other engines on the same checkpoint, in turns in one run,
print Markdown and keep the figures for `python -m bench`."""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import rates, shapes
from bench.contest import Case, Contender, Match, Sample, play
from bench.generator import COMPLETIONS, Loaded, load_processes
from bench.peers.catalogue import OURS_HTTP, PEERS, VLLM_SERVER
from bench.peers.defaults import measure_defaults
from bench.peers.report import find_figures, format_peers
from bench.peers.served_files import measure_file
from bench.peers.starting import start_peer
from bench.probe import probing
from bench.real_model import FILE, MODELS
from bench.sections import peers_file
from bench.service import BenchError, exit_on_sigterm, first_line, launch
from bench.variants import OURS, VARIANTS, Variant

PREFILLS = (512, 1024)
# Options, with the sections whose variants each of them adds.
ADDED = {"int8": ("int8",), "bfloat16": ("bfloat16",), "int4": ("int4", "w4a8")}


def main() -> None:
    options = parse_options(sys.argv[1:])
    exit_on_sigterm()
    try:
        if options.defaults:
            results = [measure_defaults(options)]
        elif options.gguf is None:
            results = [measure(options)]
        else:
            results = [measure_file(options, file) for file in options.gguf or find_files()]
    except BenchError as error:
        sys.exit(f"error: {error}")
    for result in results:
        text = json.dumps(result, indent=1, default=asdict)
        peers_file(options.cache, result["shape"]).write_text(text + "\n")
        print(format_peers(result))


def find_files() -> list[Path]:
    """Return the GGUF files of real models that `make` has downloaded. Raises BenchError if there are
    none."""
    files = sorted(MODELS.glob("*.gguf"))
    if not files:
        raise BenchError(f"{MODELS} has no GGUF file: make {FILE.relative_to(Path.cwd())}")
    return files


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("--shape", choices=list(shapes.SHAPES), default="135m", help="(default %(default)s)")
    parser.add_argument("--dtype", default="float16", help="of our weights (default %(default)s)")
    names = [peer.name for peer in PEERS]
    parser.add_argument("--only", type=_names, default=names, metavar="NAMES", help=f"of {','.join(names)}")
    parser.add_argument("--int8", action="store_true", help="measure our int8 weights too")
    parser.add_argument("--bfloat16", action="store_true", help="measure our bfloat16 arithmetic too")
    more = "measure our int4 weights too, with and without int8 activations"
    parser.add_argument("--int4", action="store_true", help=more)
    more = "measure all with their defaults instead, with the arithmetic and the types that they choose"
    parser.add_argument("--defaults", action="store_true", help=more)
    more = "measure llama.cpp and us on GGUF files instead (default: all that make has fetched)"
    parser.add_argument("--gguf", type=Path, nargs="*", metavar="FILE", help=more)
    parser.add_argument("--rounds", type=int, default=5, help="(default %(default)s)")
    parser.add_argument("--clients", type=_counts, default=[1, 8, 32], help="(default 1,8,32)")
    parser.add_argument("--input-tokens", type=int, default=128, help="(default %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="(default %(default)s)")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="where models are kept")
    parser.add_argument("--peers", type=Path, default=Path(".cache/peers"), help="where peers are installed")
    parser.add_argument("launcher", nargs="*", help="further options of the launcher, after --")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all peers. Raises BenchError if nothing can be measured; a failed peer is reported with the
    reason."""
    model = shapes.ensure_checkpoint(options.shape, options.cache)
    failures: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        probe = stack.enter_context(probing())
        contenders: list[Contender] = [stack.enter_context(rates.serving(options, model, OURS, []))]
        machine = probe()
        for variant in find_variants(options):
            if rates.is_emulated(variant.name, machine):
                failures[variant.name] = rates.find_unmeasured(machine)[variant.section]
                continue
            serving = rates.serving(options, model, variant.name, variant.flags)
            contenders.append(stack.enter_context(serving))
        if VLLM_SERVER in options.only:
            contenders.append(stack.enter_context(_serving_http(options, model)))
        for peer in PEERS:
            if peer.name in options.only:
                try:
                    contenders.append(start_peer(peer, model, options, stack))
                except BenchError as error:
                    failures[peer.name] = first_line(error)
        samples = play(make_matches(options, contenders), probe, options.rounds)
    return _result(options, samples, failures)


def find_variants(options: argparse.Namespace) -> list[Variant]:
    """Return the variants of this service that the options select."""
    sections = [section for option, added in ADDED.items() if getattr(options, option) for section in added]
    return [variant for variant in VARIANTS if variant.section in sections]


@contextlib.contextmanager
def _serving_http(options: argparse.Namespace, model: Path) -> Iterator[Loaded]:
    """This service with OpenAI's API, and its clients."""
    flags = [*rates.service_flags(options), "--http-api", "openai"]
    with launch(model, options.cache / "ours-over-http.log", flags) as (_, command):
        target = f"127.0.0.1:{command[command.index('--port') + 1]}"
        with load_processes() as generator:
            yield Loaded(OURS_HTTP, generator, target, COMPLETIONS)


def make_matches(options: argparse.Namespace, contenders: Sequence[Contender]) -> list[Match]:
    sizes = (options.input_tokens, options.new_tokens)
    cases = [Case("decode", count, *sizes) for count in options.clients]
    cases += [Case("prefill", 1, length, 1) for length in PREFILLS]
    return [(case, contenders) for case in cases]


def _result(
    options: argparse.Namespace, samples: Sequence[Sample], failures: dict[str, str]
) -> dict[str, Any]:
    return {
        "started": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "shape": options.shape,
        "rounds": options.rounds,
        "titles": {OURS: f"ours: {options.dtype} weights, through the service"}
        | {variant.name: f"ours: {variant.title}, through the service" for variant in VARIANTS}
        | {OURS_HTTP: f"ours: {options.dtype} weights, over HTTP"}
        | {peer.name: peer.title for peer in PEERS},
        "figures": find_figures(samples, options.clients, PREFILLS),
        "samples": list(samples),
        "failures": failures,
    }


def _names(text: str) -> list[str]:
    known = {peer.name for peer in PEERS}
    chosen = text.split(",") if text else []
    if unknown := set(chosen) - known:
        raise argparse.ArgumentTypeError(f"{min(unknown)} is none of {','.join(sorted(known))}")
    return chosen


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
