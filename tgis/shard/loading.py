"""From a configuration to an engine that is ready to answer: its model read, its cache sized, its kernels
compiled."""

import logging
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tgis import hub
from tgis.config import ShardConfig
from tgis.pb import shard_pb2 as pb
from tgis.shard import capacity, world
from tgis.shard.attention.cpu import CpuAttention
from tgis.shard.batch import RowTable
from tgis.shard.capacity import Demand
from tgis.shard.engine import Engine
from tgis.shard.grammar import Guides, read_tokenizer
from tgis.shard.models import catalogue
from tgis.shard.models.interface import Model
from tgis.shard.threads import configure
from tgis.shard.world import World, WorldError

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# How long a rank waits for another that is still reading its weights.
MEETING_TIMEOUT_S = 600.0
WARM_UP_TOKENS = 20


def load(config: ShardConfig) -> Engine:
    """Raises ModelNotFoundError, UnsupportedModelError, WeightsError, WorldError or CacheTooSmallError."""
    began = time.monotonic()
    directory = Path(config.model_path)
    settings = hub.read_json(directory, "config.json")
    # Whether it can be served, before anything slow happens.
    spec = catalogue.describe(settings, config.world_size)
    configure(config.cpu_threads or max(1, capacity.count_cores() // config.world_size))
    max_length = config.max_sequence_length or hub.max_sequence_length(settings)
    demand = Demand(config.block_size, max_length, config.max_batch_size, config.kv_cache_tokens)
    dtype = _choose_dtype(config.dtype, settings)
    guides = _start_guides(directory, spec.vocab_size)
    ranks = _join(config)
    model = catalogue.load(directory, settings, ranks, DTYPES[dtype])
    cache = capacity.make_cache(model.spec, ranks, DTYPES[dtype], demand)
    table = RowTable(config.max_batch_size, max_length, config.block_size, model.spec.vocab_size, CPU)
    info = _describe(config, settings, model, cache.num_blocks, dtype)
    engine = Engine(model, CpuAttention(cache), table, guides, info)
    _warm_up(engine, min(WARM_UP_TOKENS, max_length - 1))
    guides.wait_until_ready()
    logger.info(
        "loaded in %.1f s: %s weights; %s cache of %d blocks, %d tokens, %.1f requests of %d tokens",
        time.monotonic() - began,
        *(info.weight_dtype, info.cache_dtype, cache.num_blocks, cache.num_blocks * config.block_size),
        *(cache.num_blocks / demand.blocks_per_request, max_length),
    )
    return engine


def _warm_up(engine: Engine, num_tokens: int) -> None:
    """A prompt in two pieces and a token, so that no request waits for a compiler."""
    sampling = pb.Sampling(greedy=True, repetition_penalty=1, length_penalty_factor=1)
    prompt = _column([0] * num_tokens)
    opened = [pb.OpenRow(token_ids=prompt, prompt_len=num_tokens, max_new_tokens=1, sampling=sampling)]
    blocks = list(range(-(-num_tokens // engine.info.block_size)))
    for start, end in pairwise(sorted({0, num_tokens - 1, num_tokens})):
        step = pb.StepRequest(
            opened_rows=opened,
            rows=_column([0]),
            starts=_column([start]),
            ends=_column([end]),
            num_new_blocks=_column([len(blocks)]),
            new_blocks=_column(blocks),
        )
        engine.execute(step)
        opened, blocks = [], []
    engine.reset()


def _column(values: list[int]) -> bytes:
    return np.array(values, "<i4").tobytes()


def _choose_dtype(asked: str | None, settings: dict[str, Any]) -> str:
    """What is asked for, else what the checkpoint names, else float32."""
    name = asked or settings.get("dtype") or settings.get("torch_dtype")
    return name if name in DTYPES else "float32"


def _start_guides(directory: Path, vocab_size: int) -> Guides:
    """Reads the tokenizer while the weights are read."""
    return Guides(partial(read_tokenizer, directory, vocab_size, hub.eos_token_ids(directory)), vocab_size)


def _join(config: ShardConfig) -> World:
    if config.world_size == 1:
        return World(0, 1)
    if config.rendezvous is None:
        raise WorldError("the ranks of a group need a rendezvous file to meet by")
    return world.join(config.rank, config.world_size, config.rendezvous, MEETING_TIMEOUT_S)


def _describe(
    config: ShardConfig, settings: dict[str, Any], model: Model, num_blocks: int, dtype: str
) -> pb.InfoResponse:
    return pb.InfoResponse(
        model_kind=pb.InfoResponse.MODEL_KIND_DECODER_ONLY,
        model_type=settings["model_type"],
        vocab_size=model.spec.vocab_size,
        eos_token_ids=hub.eos_token_ids(Path(config.model_path)),
        block_size=config.block_size,
        num_blocks=num_blocks,
        rank=config.rank,
        world_size=config.world_size,
        epoch=config.epoch,
        weight_dtype=dtype,
        cache_dtype=dtype,
    )
