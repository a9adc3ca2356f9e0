"""Computes a short text with the unrounded weights of a model that `--quantize` rounds, to choose the factors
that smooth activations, to find the importance of columns of weights, and to warn if the rounded model's
log-probabilities differ more than usual."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from tgis.config.processes import ShardConfig
from tgis.errors import first_line
from tgis.pb import shard_pb2 as pb
from tgis.shard.collectives import ProcessGroup
from tgis.shard.layers.ops import Kernels
from tgis.shard.memory.host_limits import HostMemory
from tgis.shard.models.interface import ModelSpec
from tgis.shard.models.spec import DecoderSpec
from tgis.shard.models.streamed import score_prompt
from tgis.shard.quant.importance import choose_importance
from tgis.shard.quant.registry import find_scheme
from tgis.shard.quant.rounding import NO_INPUTS, InputFigures
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.startup.memory.memory_plan import GIB
from tgis.shard.startup.quantize.smoothing import find_factors, list_readers

logger = logging.getLogger(__name__)

# From the introduction of Charles Darwin's "On the Origin of Species", 1859.
TEXT = (
    'When on board H.M.S. "Beagle," as naturalist, I was much struck with certain facts in the distribution '
    "of the inhabitants of South America, and in the geological relations of the present to the past "
    "inhabitants of that continent. These facts seemed to me to throw some light on the origin of species, "
    "that mystery of mysteries, as it has been called by one of our greatest philosophers."
)
MAX_TOKENS = 32
MIN_TOKENS = 8  # fewer say nothing
USUAL = {
    "int8": 0.3,
    "eetq": 0.16,
    "bitsandbytes": 0.16,
    "fp8": 0.4,
    "int4": 0.65,
    "bitsandbytes-nf4": 1.05,
    "bitsandbytes-fp4": 1.4,
}
"""Maximum usual mean difference of the probe's log-probabilities, in nats, by scheme: twice that of
SmolLM2-135M-Instruct. Larger models usually lose less."""
_USUAL_OF_ACTIVATIONS, _USUAL_OF_CACHE = 0.1, 0.15  # added for 8-bit activations and an 8-bit cache


@dataclass(frozen=True)
class Probe:
    """Results of the unrounded weights."""

    token_ids: list[int]
    logprobs: torch.Tensor  # float32 [num_tokens - 1], of the tokens except the first
    inputs: InputFigures = NO_INPUTS


def open_probe(
    config: ShardConfig,
    settings: Mapping[str, Any],
    spec: ModelSpec,
    group: ProcessGroup,
    dtype: torch.dtype,
    kernels: Kernels,
    memory: HostMemory | None = None,
) -> Probe | None:
    """Compute the probe with the unrounded weights, before the model is loaded with the platform's `kernels`.
    Return None if nothing needs it, or it is impossible. All ranks must call this.
    `settings` is the model's config.json, `memory` this machine's. No option that limits lengths or steps
    changes the result, because the rounded weights depend on it.

    Raises WeightsError and ProcessGroupError."""
    needs_factors = _needs_factors(config, kernels)
    needs_importance = _needs_importance(config)
    needs_inputs = needs_factors or needs_importance
    if find_scheme(config.quantize).layout is None or (config.no_quantize_check and not needs_inputs):
        return None
    path = Path(config.model_path)
    token_ids = _tokenize(config, spec)
    # Inputs must not depend on the free memory, because a restarted shard must compute the same results.
    can_read = needs_inputs or _has_memory(path, config.quantize, memory or HostMemory())
    if not group.min(int(can_read and len(token_ids) >= MIN_TOKENS)):
        if needs_factors:
            logger.info("activations are rounded to 8 bits without smoothing")
        if needs_importance:
            logger.info("--quantize %s rounds all columns with the same importance", config.quantize)
        return None
    assert isinstance(spec, DecoderSpec), "other models have no tokens"
    readers = list_readers(spec) if needs_factors else {}
    measured = [path for paths in readers.values() for path in paths]
    scores = score_prompt(path, settings, spec, group, dtype, token_ids, measured, needs_importance)
    importance = {path: choose_importance(each) for path, each in scores.mean_squares.items()}
    known = {path: each for path, each in importance.items() if each is not None}
    return Probe(token_ids, scores.logprobs, InputFigures(find_factors(readers, scores.ranges), known))


def _needs_factors(config: ShardConfig, kernels: Kernels) -> bool:
    """Return True if activations are rounded to 8 bits, and weights to no less. Four bits would lose more by
    columns of different sizes than they win by smaller outliers of activations."""
    layout = find_scheme(config.quantize).layout
    return layout is not None and layout.bits == 8 and kernels.rounds_inputs(layout)


def _needs_importance(config: ShardConfig) -> bool:
    """Return True if the scheme searches for the scales and offsets of groups."""
    layout = find_scheme(config.quantize).layout
    return layout is not None and layout.has_offsets


def _has_memory(path: Path, quantize: str | None, memory: HostMemory) -> bool:
    """Return True if the system's file cache can hold the checkpoint, which is read a second time. Reading it
    from the disk again would take too long."""
    num_bytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    left = memory.memory_left()
    if num_bytes <= left:
        return True
    text = "--quantize %s is not checked: the checkpoint takes %.1f GiB, and %.1f GiB of memory are free"
    logger.info(text, quantize, num_bytes / GIB, left / GIB)
    return False


def _tokenize(config: ShardConfig, spec: ModelSpec) -> list[int]:
    """Return the first tokens of the text, or none if the model is no decoder or its tokenizer does not
    fit."""
    if not isinstance(spec, DecoderSpec):
        logger.info("--quantize %s is not checked: the model is no decoder-only model", config.quantize)
        return []
    file = Path(config.tokenizer_path or config.model_path) / "tokenizer.json"
    try:
        ids: list[int] = Tokenizer.from_file(str(file)).encode(TEXT).ids
    except Exception as error:  # the library raises plain exceptions
        logger.info("--quantize %s is not checked: %s", config.quantize, first_line(error))
        return []
    if not all(i < spec.vocab_size for i in ids):
        return []
    return ids[: min(MAX_TOKENS, spec.max_positions or MAX_TOKENS)]


def warn_of_loss(probe: Probe, runner: ModelRunner, config: ShardConfig, max_sequence_length: int) -> None:
    """Log how much a model runner's log-probabilities differ from the probe's: a warning if it is more than
    usual. All ranks must call this."""
    if config.no_quantize_check:
        return
    token_ids = probe.token_ids[: max_sequence_length - 1]
    if len(token_ids) < MIN_TOKENS:
        return
    actual = _score(runner, token_ids, config.block_size, config.max_step_tokens)
    if config.rank != 0:  # only rank 0's response has log-probabilities
        return
    difference = math.nan
    if actual is not None:
        difference = float((torch.from_numpy(actual) - probe.logprobs[: len(actual)]).abs().mean())
    usual = _find_usual(config)
    if difference <= usual:
        logger.info(
            "--quantize %s changes the log-probabilities of a probe text by %.2f on average; up to %.2f is "
            "usual",
            config.quantize,
            difference,
            usual,
        )
        return
    logger.warning(
        "--quantize %s changes the log-probabilities of a probe text by %.2f on average, and up to %.2f is "
        "usual: this model's weights lose much by it; compare its responses with those of --dtype, or use "
        "more bits",
        config.quantize,
        difference,
        usual,
    )


def _find_usual(config: ShardConfig) -> float:
    usual = USUAL[config.quantize or ""]
    usual += _USUAL_OF_ACTIVATIONS if config.activations is not None else 0
    return usual + (_USUAL_OF_CACHE if config.kv_cache_dtype.startswith("fp8") else 0)


def _score(
    runner: ModelRunner, token_ids: list[int], block_size: int, max_step_tokens: int
) -> npt.NDArray[np.float32] | None:
    """Return a prompt's log-probabilities, or None if they are not finite or on ranks other than 0."""
    steps = _list_steps(token_ids, block_size, max_step_tokens)
    responses = [runner.launch(step).answer() for step in steps]  # every rank computes every step
    runner.reset()
    details = [each for response in responses for each in response.input_details]
    if any(response.errors for response in responses) or not details:
        return None
    return np.concatenate([np.frombuffer(each.logprobs, "<f4") for each in details])[1:].astype(np.float32)


def _list_steps(token_ids: list[int], block_size: int, max_step_tokens: int) -> list[pb.StepRequest]:
    """Return the steps that compute a prompt."""
    count = len(token_ids)
    bounds = [*range(0, count, max_step_tokens), count]
    steps = [
        pb.StepRequest(rows=_column([0]), starts=_column([start]), ends=_column([end]))
        for start, end in pairwise(bounds)
    ]
    num_blocks = -(-count // block_size)
    steps[0].num_new_blocks, steps[0].new_blocks = _column([num_blocks]), _column(range(num_blocks))
    steps[0].opened_rows.add(
        row=0,
        state_source=-1,
        token_ids=_column(token_ids),
        prompt_len=count,
        max_new_tokens=1,
        sampling=pb.Sampling(temperature=1),
        details=pb.Details(logprobs=True, input_tokens=True),
    )
    return steps


def _column(values: Sequence[int]) -> bytes:
    return np.array(values, "<i4").tobytes()
