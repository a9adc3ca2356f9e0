"""One rank's model, cache and rows. Steps go in and answers come out, in order, on one thread."""

import logging
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tgis import hub
from tgis.config import ShardConfig
from tgis.pb import shard_pb2 as pb
from tgis.shard import answers, capacity, models, world
from tgis.shard.attention.base import Attention
from tgis.shard.attention.cpu import CpuAttention
from tgis.shard.batch import Batch, Booleans, InputSpan, Integers, RowTable
from tgis.shard.capacity import Demand
from tgis.shard.details import TokenDetails, describe, join, leave_blank
from tgis.shard.grammar import Guides, read_tokenizer
from tgis.shard.models.decoder import Decoder
from tgis.shard.sampling import sample
from tgis.shard.threads import configure
from tgis.shard.world import World, WorldError

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# How long a rank waits for another that is still reading its weights.
MEETING_TIMEOUT_S = 600.0
# Positions of a prompt whose logits exist at once.
HEAD_ROWS = 64
WARM_UP_TOKENS = 20


class Engine:
    """Executes steps. Whatever `execute` raises, nothing of the engine is to be trusted afterwards."""

    def __init__(
        self, model: Decoder, attention: Attention, table: RowTable, guides: Guides, info: pb.InfoResponse
    ) -> None:
        self.info = info
        self._model, self._attention, self._table, self._guides = model, attention, table, guides
        self._is_answering = info.rank == 0

    @classmethod
    def load(cls, config: ShardConfig) -> "Engine":
        """Ready to answer, its kernels compiled.

        Raises ModelNotFoundError, UnsupportedModelError, WeightsError, WorldError or CacheTooSmallError."""
        began = time.monotonic()
        directory = Path(config.model_path)
        settings = hub.read_json(directory, "config.json")
        # Whether it can be served, before anything slow happens.
        spec = models.describe(settings, config.world_size)
        configure(config.cpu_threads or max(1, capacity.count_cores() // config.world_size))
        max_length = config.max_sequence_length or hub.max_sequence_length(settings)
        demand = Demand(config.block_size, max_length, config.max_batch_size, config.kv_cache_tokens)
        dtype = _choose_dtype(config.dtype, settings)
        guides = _start_guides(directory, spec.vocab_size)
        ranks = _join(config)
        model = models.load(directory, settings, ranks, DTYPES[dtype])
        cache = capacity.make_cache(model.spec, ranks, DTYPES[dtype], demand)
        table = RowTable(config.max_batch_size, max_length, config.block_size, model.spec.vocab_size, CPU)
        info = _describe(config, settings, model, cache.num_blocks, dtype)
        engine = cls(model, CpuAttention(cache), table, guides, info)
        engine._warm_up(min(WARM_UP_TOKENS, max_length - 1))
        guides.wait_until_ready()
        logger.info(
            "loaded in %.1f s: %s weights; %s cache of %d blocks, %d tokens, %.1f requests of %d tokens",
            time.monotonic() - began,
            *(info.weight_dtype, info.cache_dtype, cache.num_blocks, cache.num_blocks * config.block_size),
            *(cache.num_blocks / demand.blocks_per_request, max_length),
        )
        return engine

    def reset(self) -> None:
        """Forgets all rows: a new stream begins."""
        self._table.reset()
        self._guides.reset()

    def execute(self, request: pb.StepRequest) -> pb.StepResponse:
        began = time.perf_counter_ns()
        response = pb.StepResponse(step_id=request.step_id)
        closed = np.frombuffer(request.closed_rows, "<i4").astype(np.int64)
        self._table.close(closed)
        self._guides.close(closed)
        for message in request.opened_rows:
            problem = self._table.open(message)
            if problem is not None:
                self._end_row(response, message.row, problem)
            else:
                self._guides.open(message)
        batch = self._table.pack(request)
        if batch is not None:
            with torch.inference_mode():
                self._compute(batch, response)
        response.forward_ns = time.perf_counter_ns() - began
        return response

    def _compute(self, batch: Batch, response: pb.StepResponse) -> None:
        x = self._model.forward(batch.token_ids, batch.positions, self._attention, batch.metadata)
        for span in batch.input_spans:
            self._report_input(span, x, response)
        if len(batch.sampled_rows):
            self._sample(batch, x, response)

    def _report_input(self, span: InputSpan, x: Tensor, response: pb.StepResponse) -> None:
        wanted = self._table.wanted(np.array([span.row]))
        details = self._describe_input(span, x, wanted.top_n) if wanted.anything.any() else None
        if self._is_answering:
            answers.write_input(response, span, details)

    def _describe_input(self, span: InputSpan, x: Tensor, top_n: Integers) -> TokenDetails:
        """By the raw logits; all ranks take part in these, only one looks at them."""
        num_blank = 1 if span.start == 0 else 0
        token_ids = torch.from_numpy(span.token_ids[num_blank:].astype(np.int64))
        states = x[span.first_x : span.first_x + len(token_ids)]  # [count, hidden_size]
        parts = [leave_blank(num_blank)]
        for start in range(0, len(token_ids), HEAD_ROWS):
            some = slice(start, start + HEAD_ROWS)
            logits = self._model.logits(states[some])  # [at most HEAD_ROWS, vocab_size]
            if self._is_answering:
                parts.append(describe(logits, token_ids[some], top_n.repeat(len(logits))))
        return join(parts)

    def _sample(self, batch: Batch, x: Tensor, response: pb.StepResponse) -> None:
        rows = batch.sampled_rows
        logits = self._model.logits(x if len(rows) == len(x) else x[batch.sampled_x])
        wanted = self._table.wanted(rows)
        described = wanted.anything & self._is_answering
        chosen, usable = self._choose(rows, logits, described, response)
        kept = usable.nonzero()[0]
        token_ids = chosen.numpy(force=True).astype(np.int32)[kept]
        ended = self._table.append(rows[kept], token_ids)
        self._guides.advance(rows[kept], token_ids, ended)
        response.digest = answers.digest(rows[kept], token_ids)
        if self._is_answering:
            answers.write_sampled(response, rows[kept], token_ids, ended)
        at = (described & usable).nonzero()[0]
        if len(at):
            index = torch.from_numpy(at)
            details = describe(logits[index], chosen[index], wanted.top_n[at])
            answers.write_details(response, wanted.take(kept), np.searchsorted(kept, at), details)

    def _choose(
        self, rows: Integers, logits: Tensor, described: Booleans, response: pb.StepResponse
    ) -> tuple[Tensor, Booleans]:
        """Tokens int64 [n], and where [n] there is one to be had; rows without have ended."""
        must_end, problems = self._guides.mask(logits, rows)
        batch = self._table.sampling_batch(rows, described, must_end)
        chosen, usable = sample(logits, batch, self._table.seen)
        for i in (~usable).nonzero()[0].tolist():
            if i not in problems:
                self._end_row(response, int(rows[i]), "the model gives no finite score to choose a token by")
        for i, problem in problems.items():
            usable[i] = False
            self._end_row(response, int(rows[i]), problem, pb.RowError.CAUSE_GRAMMAR)
        return chosen, usable

    def _end_row(
        self,
        response: pb.StepResponse,
        row: int,
        problem: str,
        cause: pb.RowError.Cause = pb.RowError.CAUSE_UNSPECIFIED,
    ) -> None:
        self._table.fail(np.array([row]))
        logger.warning("row %d cannot be served: %s", row, problem)
        if self._is_answering:
            response.errors.add(row=row, message=problem, cause=cause)

    def _warm_up(self, num_tokens: int) -> None:
        """A prompt in two pieces and a token, so that no request waits for a compiler."""
        sampling = pb.Sampling(greedy=True, repetition_penalty=1, length_penalty_factor=1)
        prompt = _column([0] * num_tokens)
        opened = [pb.OpenRow(token_ids=prompt, prompt_len=num_tokens, max_new_tokens=1, sampling=sampling)]
        blocks = list(range(-(-num_tokens // self.info.block_size)))
        for start, end in pairwise(sorted({0, num_tokens - 1, num_tokens})):
            step = pb.StepRequest(
                opened_rows=opened,
                rows=_column([0]),
                starts=_column([start]),
                ends=_column([end]),
                num_new_blocks=_column([len(blocks)]),
                new_blocks=_column(blocks),
            )
            self.execute(step)
            opened, blocks = [], []
        self.reset()


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
    config: ShardConfig, settings: dict[str, Any], model: Decoder, num_blocks: int, dtype: str
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
