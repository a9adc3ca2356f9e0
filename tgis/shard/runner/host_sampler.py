"""Samples a step's tokens on the host, from logits on any device, and reports token details."""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tgis.pb import shard_pb2 as pb
from tgis.shard.layers.lora import TokenAdapters
from tgis.shard.models.interface import Model
from tgis.shard.runner import step_response
from tgis.shard.runner.batch_builder import Work
from tgis.shard.runner.forward import Outputs
from tgis.shard.runner.row_table import Booleans, Integers, RowTable
from tgis.shard.runner.step_response import Problem, SampledDetails, SampledTokens, report_problem
from tgis.shard.sampling.grammar import Guides
from tgis.shard.sampling.logprobs import (
    InputSpan,
    TokenDetails,
    blank_details,
    compute_details,
    concatenate,
)
from tgis.shard.sampling.sampler import sample

# Number of prompt positions whose logits are in memory at the same time.
HEAD_ROWS = 64


class HostSampler:
    """Sampler for the rows of a table. `compute` computes rows' last tokens again. Only rank 0 answers."""

    def __init__(
        self,
        model: Model,
        compute: Callable[[Integers], Outputs],
        table: RowTable,
        guides: Guides,
        is_answering: bool,
    ):
        self._model = model
        self._compute = compute
        self._table = table
        self._guides = guides
        self._is_answering = is_answering

    def answer(
        self, work: Work, adapters: TokenAdapters | None, outputs: Outputs, response: pb.StepResponse
    ) -> None:
        """Report the requested input tokens of a step and sample its next tokens. `adapters` has the adapters
        of the step's tokens. The logits are overwritten."""
        for span in work.input_spans:
            self._report_input(span, outputs.x, adapters, response)
        if outputs.logits is not None:
            self._sample(work, outputs.logits, response)

    def _report_input(
        self, span: InputSpan, x: Tensor, adapters: TokenAdapters | None, response: pb.StepResponse
    ) -> None:
        traits = self._table.traits(np.array([span.row]))
        details = None
        if traits.wants_details.any():
            details = self._compute_input_details(span, x, adapters, traits.wanted["top_n"])
        if self._is_answering:
            step_response.write_input(response, span, details)

    def _compute_input_details(
        self, span: InputSpan, x: Tensor, adapters: TokenAdapters | None, top_n: Integers
    ) -> TokenDetails:
        num_blank = 1 if span.start == 0 else 0
        token_ids = torch.from_numpy(span.token_ids[num_blank:].astype(np.int64)).to(x.device)
        end = span.first_x + len(token_ids)
        parts = [blank_details(num_blank)]
        for start in range(0, len(token_ids), HEAD_ROWS):
            chunk = slice(start, start + HEAD_ROWS)
            at = slice(span.first_x + start, min(span.first_x + start + HEAD_ROWS, end))
            # All ranks must compute the logits together, but only rank 0 uses them.
            logits = self._model.logits(x[at], adapters and adapters.take(at))  # [n, vocab_size]
            if self._is_answering:
                parts.append(compute_details(logits, token_ids[chunk], top_n.repeat(len(logits))))
        return concatenate(parts)

    def _sample(self, work: Work, logits: Tensor, response: pb.StepResponse) -> None:
        if work.drafts is None:
            parts = [self._sample_rows(work.sampled_rows, logits)]
            problems = parts[0].problems
        else:
            parts, problems = self._sample_drafts(work, logits)
        for problem in problems:
            self._table.fail(np.array([problem.row]))
            report_problem(response, problem, self._is_answering)
        response.digest = step_response.digest(parts)
        if self._is_answering:
            step_response.write_sampled(response, parts, work.num_proposed)

    def _sample_drafts(self, work: Work, logits: Tensor) -> tuple[list[SampledTokens], list[Problem]]:
        """Sample the positions of rows with drafts.

        Only problems at a row's first position are reported: a problem after a draft will recur in the row's
        next step, without a draft before it. If a row's first logits are not finite, they are computed again
        without drafts, because a draft may be the cause."""

        def sample_at(at: Integers) -> SampledTokens:
            return self._sample_rows(work.sampled_rows[at], logits[torch.from_numpy(at)])

        parts = list(_verify_drafts(work, sample_at))
        problems = parts[0].problems
        unusable_rows = [problem.row for problem in problems if problem.cause != pb.RowError.CAUSE_GRAMMAR]
        if unusable_rows:
            retried = np.array(unusable_rows)
            logits_again = self._compute(retried).logits
            assert logits_again is not None
            parts.append(self._sample_rows(retried, logits_again))
            problems = [each for each in problems if each.row not in unusable_rows] + parts[-1].problems
        return parts, problems

    def _sample_rows(self, rows: Integers, logits: Tensor) -> SampledTokens:
        """Sample the next tokens of rows [n] from logits [n, vocab_size]."""
        traits = self._table.traits(rows)
        wants_details = traits.wants_details & self._is_answering
        raw_at = traits.raw_details
        raw = None
        if len(raw_at) and self._is_answering:
            raw = logits[torch.from_numpy(raw_at)]  # a copy, [num_raw, vocab_size]
        chosen, usable, problems = self._choose(rows, logits, wants_details)
        kept = usable.nonzero()[0]
        token_ids = chosen.numpy(force=True).astype(np.int32)
        if len(kept) < len(rows):
            rows = rows[kept]
            token_ids = token_ids[kept]
        ended = self._table.append(rows, token_ids)
        self._guides.advance(rows, token_ids, ended)
        details = None
        if raw is not None:
            logits[torch.from_numpy(raw_at)] = raw
        if wants_details.any():
            details = self._compute_sample_details(logits, chosen, kept, wants_details[kept], traits.wanted)
        return SampledTokens(kept, rows, token_ids, ended, details, problems)

    def _compute_sample_details(
        self,
        logits: Tensor,
        chosen: Tensor,
        kept: Integers,
        wants_details: Booleans,
        wanted: npt.NDArray[np.void],
    ) -> SampledDetails:
        """Return the details of the tokens at `kept` where `wants_details` [num_kept] is True."""
        at = kept[wants_details]
        index = torch.from_numpy(at)
        details = compute_details(logits[index], chosen[index], wanted["top_n"][at])
        return SampledDetails(wanted[at], wants_details.nonzero()[0], details)

    def _choose(
        self, rows: Integers, logits: Tensor, wants_details: Booleans
    ) -> tuple[Tensor, Booleans, list[Problem]]:
        """Return token ids int64 [n], bool [n], True where they are valid, and the problems of other rows."""
        must_end, grammar_problems = self._guides.mask(logits, rows)
        batch = self._table.sampling_batch(rows, wants_details, must_end)
        chosen, usable = sample(logits, batch, self._table.seen)
        problems = [
            Problem(int(rows[i]), step_response.NOT_FINITE)
            for i in (~usable).nonzero()[0].tolist()
            if i not in grammar_problems
        ]
        for i, text in grammar_problems.items():
            usable[i] = False
            problems.append(Problem(int(rows[i]), text, pb.RowError.CAUSE_GRAMMAR))
        return chosen, usable, problems


def _verify_drafts(work: Work, sample: Callable[[Integers], SampledTokens]) -> Iterator[SampledTokens]:
    """Yield each row's first sample, then the second sample of the rows whose first sample equals the draft,
    and so on. A row stops when it ends or when no token can be sampled for it.

    `sample` samples the tokens at indices [n] in [num_sampled], at most one per row."""
    assert work.drafts is not None
    rows = work.sampled_rows
    at = np.flatnonzero(np.diff(rows, prepend=-1))
    while len(at):
        sampled = sample(at)
        yield sampled
        at = at[sampled.kept]
        at = at[(sampled.token_ids == work.drafts[at]) & ~sampled.ended] + 1
