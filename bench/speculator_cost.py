"""Measures the cost of speculators whose drafts are always wrong: the same requests with one and without, in
turns, by the router's scheduler and a model runner in this process. The weights of model and speculator are
random. CPU time is measured, so that other processes matter little."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench import shapes
from bench.shapes import Shape, model_config
from bench.speculator_files import write
from bench.steps import load_runner
from tgis.pb import shard_pb2 as pb
from tgis.router.scheduling.block_pool import BlockPool
from tgis.router.scheduling.proposers.shard_drafts import ShardDrafts
from tgis.router.scheduling.scheduler import Scheduler
from tgis.router.scheduling.token_budget import TokenBudget
from tgis.router.sequence import Sampling, Sequence, Stopping
from tgis.router.shards.codec import decode_answer, encode_step
from tgis.shard.runner.interface import ModelRunner

INPUT_TOKENS, NEW_TOKENS = 64, 96
MAX_STEP_TOKENS = 512
CACHE_TOKENS = 16384
NUM_TOKENS = 3  # of the MLP speculator and the Medusa heads
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


class Service:
    """Scheduler and shard that always have the same number of sequences."""

    def __init__(self, runner: ModelRunner) -> None:
        info = runner.info
        self._runner = runner
        self._budget = TokenBudget(MAX_STEP_TOKENS, 0.1)
        self._proposer = ShardDrafts(info.max_drafts, self._budget.predict) if info.max_drafts else None
        pool = BlockPool(info.num_blocks, info.block_size)
        self._scheduler = Scheduler(pool, 64, proposer=self._proposer)
        self.sequences: list[Sequence] = []
        self._num_live = 0
        self.num_drafts = 0

    def run(self, num_sequences: int, num_tokens: int) -> float:
        """Generate at least that many tokens. Return the seconds of CPU time per token."""
        began, count = time.process_time(), 0
        while count < num_tokens:
            while self._num_live < num_sequences:
                self._scheduler.add(self._open())
            count += self._step()
        return (time.process_time() - began) / count

    def finish(self) -> None:
        while self._num_live:
            self._step()

    def _open(self) -> Sequence:
        random = np.random.default_rng(len(self.sequences))
        ids = random.integers(2, self._runner.info.vocab_size, INPUT_TOKENS).tolist()
        self.sequences.append(Sequence(ids, Stopping(NEW_TOKENS), Sampling(greedy=True)))
        self._num_live += 1
        return self.sequences[-1]

    def _step(self) -> int:
        """Compute a step like the engine. Return the number of generated tokens."""
        scheduler = self._scheduler
        num_decoding = scheduler.num_decoding
        num_prompts = len(scheduler.waiting) + len(scheduler.running) - num_decoding
        step = scheduler.next_step(self._budget.prompt_tokens(num_decoding, num_prompts))
        assert step is not None, "nothing is in flight"
        request = pb.StepRequest.FromString(encode_step(step).SerializeToString())
        answer = decode_answer(step, self._runner.launch(request).answer())
        scheduler.apply_answer(step, answer.num_proposed)
        if not step.max_proposed:
            self._budget.observe(answer.num_tokens, answer.forward_s)
        if self._proposer is not None:
            self._proposer.observe(step, answer.drafts, answer.forward_s, answer.follow_s)
        self.num_drafts += answer.num_proposed
        for sequence, token, ended in answer.sampled:
            scheduler.append_token(sequence, token.token_id)
            if ended:
                scheduler.finish(sequence)
                self._num_live -= 1
        return len(answer.sampled)


def compare(options: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Return the CPU time with a speculator relative to that without, for each number of sequences."""
    model = shapes.ensure_checkpoint(options.shape, options.cache)
    heads = write_wrong(kind, shapes.SHAPES[options.shape], options.cache / f"wrong-{kind}-{options.shape}")
    services = [
        Service(load_runner(model, options.dtype, CACHE_TOKENS, cpu_threads=1, speculator=speculator))
        for speculator in (None, str(heads))
    ]
    figures: dict[str, Any] = {}
    for count in options.batch:
        ratios = []
        for number in range(options.rounds + 1):
            num_tokens = count * options.steps
            seconds = [service.run(count, num_tokens) for service in services]
            ratios.append(round(seconds[1] / seconds[0], 3))
            label = f"{count} sequences, round {number}"
            print(f"{label}: {ratios[-1]} ({1000 * seconds[0]:.2f} ms)", file=sys.stderr, flush=True)
        # The first round compiles kernels, and is the first one of all in which the speculator is tried.
        figures[f"{count} sequences"] = {"median": statistics.median(ratios[1:]), "rounds": ratios}
    for service in services:
        service.finish()
    plain, drafted = ([each.token_ids for each in service.sequences] for service in services)
    assert all(one == other for one, other in zip(plain, drafted, strict=False)), "a text differs"
    return {**figures, "drafts": services[1].num_drafts}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.speculator_cost", description=__doc__)
    parser.add_argument("kinds", nargs="*", default=["eagle3"], help="mlp, medusa, eagle3 (default eagle3)")
    parser.add_argument("--shape", choices=list(shapes.SHAPES), default="135m", help="(default %(default)s)")
    parser.add_argument("--dtype", default="float16", help="type of the weights (default %(default)s)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="(default 1 8 32)")
    parser.add_argument("--rounds", type=int, default=5, help="(default %(default)s)")
    parser.add_argument("--steps", type=int, default=128, help="steps of a round (default %(default)s)")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="(default %(default)s)")
    options = parser.parse_args()
    print(json.dumps({kind: compare(options, kind) for kind in options.kinds}, indent=1))


if __name__ == "__main__":
    main()
