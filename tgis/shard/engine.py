"""One rank's model, cache and rows. Steps go in and answers come out, in order, on one thread."""

import logging
import time

import numpy as np
import torch
from torch import Tensor

from tgis.pb import shard_pb2 as pb
from tgis.shard import answers
from tgis.shard.attention.base import Attention
from tgis.shard.batch import Batch, Booleans, InputSpan, Integers, RowTable
from tgis.shard.contents import Contents
from tgis.shard.details import TokenDetails, describe, join, leave_blank
from tgis.shard.grammar import Guides
from tgis.shard.lora import TokenAdapters
from tgis.shard.models.interface import EncoderDecoder, Model
from tgis.shard.sampling import sample

logger = logging.getLogger(__name__)

# Positions of a prompt whose logits exist at once.
HEAD_ROWS = 64


class Engine:
    """Executes steps. Whatever `execute` raises, nothing of the engine is to be trusted afterwards."""

    def __init__(
        self,
        model: Model,
        attention: Attention,
        table: RowTable,
        guides: Guides,
        info: pb.InfoResponse,
        contents: Contents,
    ) -> None:
        """`table` finds in `contents` what rows name; it may be filled beside the steps."""
        self.info, self.contents = info, contents
        self.model, self._attention, self._table, self._guides = model, attention, table, guides
        self._is_answering = info.rank == 0

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
        encoder_inputs, batch = self._table.pack_encoder(request.opened_rows), self._table.pack(request)
        with torch.inference_mode():
            if encoder_inputs is not None:
                assert isinstance(self.model, EncoderDecoder), "only its rows have inputs for an encoder"
                self.model.encode(encoder_inputs, self._attention)
            if batch is not None:
                self._compute(batch, response)
        response.forward_ns = time.perf_counter_ns() - began
        return response

    def _compute(self, batch: Batch, response: pb.StepResponse) -> None:
        x = self.model.forward(batch.inputs, self._attention)
        for span in batch.input_spans:
            self._report_input(span, x, batch.inputs.adapters, response)
        if len(batch.sampled_rows):
            self._sample(batch, x, response)

    def _report_input(
        self, span: InputSpan, x: Tensor, adapters: TokenAdapters | None, response: pb.StepResponse
    ) -> None:
        wanted = self._table.wanted(np.array([span.row]))
        details = self._describe_input(span, x, adapters, wanted.top_n) if wanted.anything.any() else None
        if self._is_answering:
            answers.write_input(response, span, details)

    def _describe_input(
        self, span: InputSpan, x: Tensor, adapters: TokenAdapters | None, top_n: Integers
    ) -> TokenDetails:
        """By the raw logits; all ranks take part in these, only one looks at them."""
        num_blank = 1 if span.start == 0 else 0
        token_ids = torch.from_numpy(span.token_ids[num_blank:].astype(np.int64)).to(x.device)
        end = span.first_x + len(token_ids)
        parts = [leave_blank(num_blank)]
        for start in range(0, len(token_ids), HEAD_ROWS):
            some = slice(start, start + HEAD_ROWS)
            at = slice(span.first_x + start, min(span.first_x + start + HEAD_ROWS, end))
            logits = self.model.logits(x[at], adapters and adapters.take(at))  # [n, vocab_size]
            if self._is_answering:
                parts.append(describe(logits, token_ids[some], top_n.repeat(len(logits))))
        return join(parts)

    def _sample(self, batch: Batch, x: Tensor, response: pb.StepResponse) -> None:
        rows = batch.sampled_rows
        adapters, last = batch.inputs.adapters, batch.sampled_x
        if len(rows) < len(x):
            x, adapters = x[last], adapters and adapters.take(last)
        logits = self.model.logits(x, adapters)
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
