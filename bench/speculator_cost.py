"""Measures the cost of speculators whose drafts are always wrong: the same requests to a service with one and
to a service without, in turns. The weights of model and speculator are random."""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import shapes
from bench.generator import Generator, closed_loop, load_processes, new_prompts
from bench.service import BenchError, exit_on_sigterm, launch
from bench.shapes import Shape, model_config
from bench.speculator_files import write
from bench.speculator_gain import Service, read_acceptance

INPUT_TOKENS, NEW_TOKENS = 128, 128
CONVERSATIONS = {1: 4, 8: 16, 32: 64}  # by number of clients
NUM_TOKENS = 3  # of the MLP speculator and the Medusa heads
TIMEOUT_S = 300.0
STD = 0.02

Files = tuple[dict[str, Any], dict[str, tuple[int, ...]], str]
"""Configuration, shapes of tensors, and the name of their file."""


def make_mlp(shape: Shape) -> Files:
    width, vocab, inner = shape.hidden_size, shape.vocab_size, shape.hidden_size
    config = {"model_type": "mlp_speculator", "n_predict": NUM_TOKENS, "inner_dim": inner, "emb_dim": width}
    sizes: dict[str, tuple[int, ...]] = {}
    for i in range(NUM_TOKENS):
        sizes |= {
            f"emb.{i}.weight": (vocab, inner),
            f"proj.{i}.weight": (inner, inner if i else width),
            f"ln.{i}.weight": (inner,),
            f"ln.{i}.bias": (inner,),
            f"head.{i}.weight": (vocab, inner),
        }
    return config | {"vocab_size": vocab}, sizes, "model.safetensors"


def make_medusa(shape: Shape) -> Files:
    width = shape.hidden_size
    sizes: dict[str, tuple[int, ...]] = {}
    for i in range(NUM_TOKENS):
        sizes |= {f"{i}.0.linear.weight": (width, width), f"{i}.0.linear.bias": (width,)}
        sizes[f"{i}.1.weight"] = (shape.vocab_size, width)
    config = {"medusa_num_heads": NUM_TOKENS, "medusa_num_layers": 1}
    return config, sizes, "medusa_lm_head.safetensors"


def make_eagle3(shape: Shape) -> Files:
    width, inner = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = {
        "input_layernorm": (width,),
        "hidden_norm": (width,),
        "post_attention_layernorm": (width,),
        "self_attn.q_proj": (q, 2 * width),
        "self_attn.k_proj": (kv, 2 * width),
        "self_attn.v_proj": (kv, 2 * width),
        "self_attn.o_proj": (width, q),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    sizes: dict[str, tuple[int, ...]] = {f"midlayer.{name}.weight": size for name, size in layer.items()}
    sizes |= {"fc.weight": (width, 3 * width), "norm.weight": (width,)}
    sizes["lm_head.weight"] = (shape.vocab_size, width)
    config = {**model_config(shape), "num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"]}
    return {**config, "draft_vocab_size": shape.vocab_size}, sizes, "model.safetensors"


KINDS: dict[str, Callable[[Shape], Files]] = {"mlp": make_mlp, "medusa": make_medusa, "eagle3": make_eagle3}


def write_wrong(kind: str, shape: Shape, directory: Path) -> Path:
    """Write a speculator of random weights, whose drafts are almost never right."""
    config, sizes, file = KINDS[kind](shape)
    random = torch.Generator().manual_seed(1)
    tensors: dict[str, Tensor] = {}
    for name, size in sizes.items():
        is_norm = len(size) == 1 and name.endswith("weight")
        tensors[name] = torch.ones(size) if is_norm else STD * torch.randn(size, generator=random)
    write(directory, config, tensors, file)
    return directory


def compare(generator: Generator, services: list[Service], clients: int, rounds: int) -> Iterator[float]:
    """Yield the seconds of a service with a speculator relative to those without, for each round. Each
    service answers twice in a round. Raises BenchError."""
    for number in range(rounds + 1):
        workload = new_prompts(INPUT_TOKENS, NEW_TOKENS, is_unary=True)
        sizes = {"num_conversations": CONVERSATIONS[clients], "timeout_s": TIMEOUT_S}
        job = closed_loop("", workload, clients, **sizes)
        without, speculating = (service.target for service in services)
        seconds, texts = [], set()
        for address in (without, speculating, speculating, without):
            answers = generator.answers(replace(job, target=replace(job.target, address=address)))
            seconds.append(max(answer.ended for answer in answers))
            texts.add(tuple(answer.digest for answer in answers))
        if len(texts) > 1:
            raise BenchError("the speculator changed a text")
        ratio = (seconds[1] + seconds[2]) / (seconds[0] + seconds[3])
        print(f"{clients} clients: {ratio:.3f}", file=sys.stderr, flush=True)
        if number:  # the first round warms up the kernels
            yield ratio


def run(options: argparse.Namespace, kind: str, generator: Generator) -> dict[str, Any]:
    """Return the ratios of one kind. Raises BenchError."""
    model = shapes.ensure_checkpoint(options.shape, options.cache)
    heads = write_wrong(kind, shapes.SHAPES[options.shape], options.cache / f"wrong-{kind}-{options.shape}")
    flags, log = ["--dtype", options.dtype, *options.option], options.cache / f"wrong-{kind}"
    with (
        launch(model, log.with_suffix(".without.log"), flags) as (without, _),
        launch(model, log.with_suffix(".log"), [*flags, "--speculator", str(heads)]) as (target, command),
    ):
        service = Service(target, command[command.index("--port") + 1])
        services = [Service(without, ""), service]
        figures: dict[str, Any] = {}
        for clients in options.clients:
            ratios = [*compare(generator, services, clients, options.rounds)]
            figures[f"{clients} clients"] = {
                "median": round(statistics.median(ratios), 3),
                "rounds": [round(ratio, 3) for ratio in ratios],
            }
        return {**figures, **read_acceptance(service)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.speculator_cost", description=__doc__)
    parser.add_argument("kinds", nargs="*", default=["eagle3"], help="mlp, medusa, eagle3 (default eagle3)")
    parser.add_argument("--shape", choices=list(shapes.SHAPES), default="135m", help="(default %(default)s)")
    parser.add_argument("--dtype", default="float16", help="type of the weights (default %(default)s)")
    parser.add_argument("--clients", type=int, nargs="+", choices=list(CONVERSATIONS), default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5, help="(default %(default)s)")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="(default %(default)s)")
    parser.add_argument("--option", action="append", default=[], help="further option of the services")
    options = parser.parse_args()
    exit_on_sigterm()
    try:
        with load_processes() as generator:
            figures = {kind: run(options, kind, generator) for kind in options.kinds}
    except BenchError as error:
        sys.exit(f"error: {error}")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
