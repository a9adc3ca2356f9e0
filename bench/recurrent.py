"""`python -m bench.recurrent`: measure prompts and decode steps of models with recurrent layers beside a
model with only attention, all with about the same number of weights, in turns in one run.

A prompt's share of the products is the time that the machine needs for the model's matrix products, at its
rate of one large product in the same arithmetic, divided by the time of the prompt."""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.machine import Limits
from bench.report import format_table
from bench.shapes import SHAPES, Shape, ensure_checkpoint
from bench.steps import MAX_LENGTH, Rows, load_runner
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.startup.platforms.choose_platform import has_fast_bfloat16

BASE = "135m"  # the model with only attention, whose sizes the others share
ARITHMETICS = ("float32", "auto")
PROMPT, CONTEXT = 2048, 128
BATCHES = (1, 8, 32)
ROUNDS, STEPS = 5, 10
RATE_SECONDS = 0.5
COLUMNS = ("model", "prompt s", "against attention", "share of the products")


def gated_delta_net(base: Shape) -> transformers.PretrainedConfig:
    """Return a configuration like Qwen 3.5's: three of four layers are gated DeltaNet."""
    heads = {"linear_num_value_heads": 5, "linear_num_key_heads": 5}
    widths = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    sizes = _share_sizes(base) | heads | widths
    return transformers.Qwen3_5TextConfig(**sizes, num_hidden_layers=24)


def mamba2(base: Shape) -> transformers.PretrainedConfig:
    """Return a configuration like Granite 4's: nine of ten layers are Mamba 2."""
    kinds = ["attention" if layer % 10 == 5 else "mamba" for layer in range(22)]
    mamba = {"mamba_n_heads": 2 * base.hidden_size // 64, "mamba_d_head": 64, "mamba_d_state": 128}
    sizes = {"num_hidden_layers": len(kinds), "layer_types": kinds, "num_local_experts": 0}
    inner = {"shared_intermediate_size": base.intermediate_size, "mamba_n_groups": 1}
    return transformers.GraniteMoeHybridConfig(**_share_sizes(base), **sizes, **mamba, **inner)


KINDS: dict[str, Callable[[Shape], transformers.PretrainedConfig]] = {
    "gated DeltaNet": gated_delta_net,
    "Mamba 2": mamba2,
}


def _share_sizes(base: Shape) -> dict[str, Any]:
    return {
        "hidden_size": base.hidden_size,
        "intermediate_size": base.intermediate_size,
        "num_attention_heads": base.num_heads,
        "num_key_value_heads": base.num_kv_heads,
        "head_dim": base.head_dim,
        "vocab_size": base.vocab_size,
        "tie_word_embeddings": base.tie_embeddings,
    }


@dataclass
class MeasuredModel:
    """A model runner, and the seconds of prompts and of decode steps by their number of rows."""

    runner: ModelRunner
    num_weights: int
    """Number of weights that each token of a prompt is multiplied by."""
    prompts: list[float] = field(default_factory=list)
    steps: dict[int, list[float]] = field(default_factory=lambda: {batch: [] for batch in BATCHES})

    def measure(self, prompt: int, seed: int) -> None:
        self.prompts.append(_time_prompt(self.runner, prompt, seed))
        for batch, times in self.steps.items():
            times.append(_time_decode(self.runner, batch))

    @property
    def prompt_s(self) -> float:
        return _typical(self.prompts)


def main() -> None:
    options = parse_options()
    models = {name: _ensure(name, options.cache) for name in ("attention", *KINDS)}
    for arithmetic in ARITHMETICS:
        rate, measured = measure(models, arithmetic, options.prompt, options.rounds)
        print(format_results(arithmetic, options.prompt, rate, measured), end="\n\n", flush=True)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.recurrent", description=__doc__)
    parser.add_argument(
        "--prompt", type=int, default=PROMPT, help=f"tokens, at most {MAX_LENGTH - 2} (default %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="(default %(default)s)")
    parser.add_argument(
        "--cache", type=Path, default=Path(".cache/bench"), help="directory of models (default %(default)s)"
    )
    return parser.parse_args(arguments)


def _ensure(name: str, cache: Path) -> Path:
    """Return the directory of a model's checkpoint. Write it if it is not cached."""
    if name == "attention":
        return ensure_checkpoint(BASE, cache)
    config, directory = KINDS[name](SHAPES[BASE]), cache / f"{BASE}-{name.replace(' ', '-')}"
    if not (directory / "model.safetensors").is_file():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(directory)
    return directory


def measure(
    paths: dict[str, Path], arithmetic: str, prompt: int, rounds: int
) -> tuple[float, dict[str, MeasuredModel]]:
    """Return the machine's operations per second of a large product, and the models. A round measures each of
    them once; the first one warms up."""
    models = {name: _load(path, arithmetic) for name, path in paths.items()}
    is_rounded = arithmetic == "auto" and has_fast_bfloat16(True)
    machine, dtype = Limits(read_bytes=4), torch.bfloat16 if is_rounded else torch.float32
    rates = []
    for index in range(1 + rounds):
        rates.append(machine.gemm(RATE_SECONDS, dtype))
        for model in models.values():
            model.measure(prompt, index)
    return _typical(rates), models


def _load(path: Path, arithmetic: str) -> MeasuredModel:
    tokens = max(MAX_LENGTH, max(BATCHES) * (CONTEXT + 2 * STEPS + 32))
    runner = load_runner(path, "bfloat16", tokens, cpu_arithmetic=arithmetic, max_batch_size=max(BATCHES))
    return MeasuredModel(runner, count_body_weights(path))


def _typical(values: Sequence[float]) -> float:
    """Return the median of all rounds after the warm-up."""
    return statistics.median(values[1:])


def count_body_weights(model: Path) -> int:
    """Return the number of weights in matrices other than the embedding, which is also the head."""
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(model)
        body = transformers.AutoModel.from_config(config)
    return sum(
        each.numel() for name, each in body.named_parameters() if each.dim() == 2 and "embed" not in name
    )


def _time_prompt(runner: ModelRunner, length: int, seed: int) -> float:
    runner.reset()
    [step] = Rows(runner, 1, length, 2, seed).prefill(length)
    return _time(lambda: runner.launch(step).answer())


def _time_decode(runner: ModelRunner, batch: int) -> float:
    """Return the seconds of a step, the median of several after as many steps of warm-up."""
    runner.reset()
    rows = Rows(runner, batch, CONTEXT, 2 * STEPS + 2)
    runner.launch(rows.resume()).answer()
    times = [_time(lambda: runner.launch(rows.decode()).answer()) for _ in range(2 * STEPS)]
    return statistics.median(times[STEPS:])


def _time(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def format_results(arithmetic: str, prompt: int, rate: float, models: dict[str, MeasuredModel]) -> str:
    base = models["attention"].prompt_s
    rows = [
        [
            f"{name}, {model.num_weights / 1e6:.0f} million weights",
            f"{model.prompt_s:.3f}",
            f"{model.prompt_s / base:.2f}",
            f"{2 * model.num_weights * prompt / rate / model.prompt_s:.2f}",
            *(f"{1e3 * _typical(times):.2f}" for times in model.steps.values()),
        ]
        for name, model in models.items()
    ]
    title = f"**--cpu-arithmetic {arithmetic}**, prompt of {prompt:,}, products at {rate / 1e9:.0f} GFLOP/s"
    columns = (*COLUMNS, *(f"{batch} rows ms" for batch in BATCHES))
    return f"{title}\n\n{format_table(columns, rows)}"


if __name__ == "__main__":
    main()
