"""Encodes steps as messages for the shards and decodes their answers. Messages contain columns of raw bytes,
so that encoding a step of hundreds of sequences takes microseconds."""

import struct
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from tgis.pb import shard_pb2 as pb
from tgis.router.scheduling.step import DraftResult, Step, WorkItem
from tgis.router.sequence import AdapterInfo, Details, Sequence, TokenDetail

TopTokens = tuple[tuple[int, float], ...]

MAX_U32 = 2**32 - 1


class SampledToken(NamedTuple):
    sequence: Sequence
    token: TokenDetail
    ended: bool
    """True if the shards compute nothing more for the sequence."""


@dataclass(frozen=True)
class InputDetails:
    """Token details of a sequence's prompt, from position `start` on."""

    sequence: Sequence
    start: int
    tokens: list[TokenDetail]


@dataclass(frozen=True)
class RowFailure:
    sequence: Sequence
    cause: str
    """Shards' error text, for logs only."""
    by_grammar: bool
    """True if the sequence's grammar caused the failure."""


class StepAnswer(NamedTuple):
    step: Step
    sampled: list[SampledToken]
    input_details: list[InputDetails]
    failed: list[RowFailure]
    forward_s: float
    num_proposed: int
    """Number of drafts that the shards proposed."""
    path: str
    """`StepPath` in lower case, such as graph; empty if the shards have no GPU."""
    drafts: AnySequence[DraftResult] = ()
    """Results of the sequences with drafts."""
    follow_s: float = 0.0
    """The part of `forward_s` in which the shards' speculator followed the step."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computed."""
        return self.step.num_tokens - self.step.max_proposed + self.num_proposed


def encode_step(step: Step, timeout_s: float = 0.0) -> pb.StepRequest:
    """Encode a step. A shard that takes longer than `timeout_s` is considered hanging; 0: no limit."""
    _, rows, starts, ends, _, _, new_blocks, drafts, saves = zip(*step.work, strict=True)
    if not step.num_drafts and not step.max_proposed:
        drafts = ()
    return pb.StepRequest(
        step_id=step.step_id,
        closed_rows=_pack(step.closed_rows),
        opened_rows=[_encode_row(item) for item in step.work[step.num_decodes :] if item.opens],
        rows=_pack(rows),
        starts=_pack(starts),
        ends=_pack(ends),
        num_new_blocks=_pack([*map(len, new_blocks)]),
        new_blocks=_pack([*chain.from_iterable(new_blocks)]),
        num_drafts=_pack([len(draft.token_ids) for draft in drafts]) if step.num_drafts else b"",
        draft_ids=_pack([token_id for draft in drafts for token_id in draft.token_ids]),
        max_drafts=_pack([draft.max_proposed for draft in drafts]) if step.max_proposed else b"",
        state_saves=b"" if all(slot is None for slot in saves) else _pack([*map(_encode_slot, saves)]),
        followed=bytes([item.sequence.is_followed for item in step.work]) if step.num_followed else b"",
        timeout_ms=min(round(1000 * timeout_s), MAX_U32),
    )


def decode_answer(step: Step, response: pb.StepResponse) -> StepAnswer:
    """Decode rank 0's response. Its rows refer to `step`, even if other sequences use them by now. Raises
    KeyError and ValueError if it is not a valid answer to the step."""
    if response.step_id != step.step_id:
        raise ValueError("the response answers another step")
    proposed = _read_proposed(step, response)
    if step.num_drafts or proposed or response.num_tokens:
        sampled = list(_drafted(step, response, proposed))
    else:
        sampled = _sampled(step, response)
    sequences: dict[int, Sequence] = {}
    if response.input_details or response.errors:
        sequences = {item.row: item.sequence for item in step.work}
    return StepAnswer(
        step,
        sampled,
        [_input_details(sequences[details.row], details) for details in response.input_details],
        [
            RowFailure(sequences[error.row], error.message, error.cause == pb.RowError.CAUSE_GRAMMAR)
            for error in response.errors
        ],
        response.forward_ns / 1e9,
        sum(proposed.values()),
        _read_path(response),
        [*_draft_results(step, response, proposed)] if step.num_drafts or proposed else (),
        response.follow_ns / 1e9,
    )


def _pack(values: AnySequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def _integers(column: bytes) -> list[int]:
    return [*struct.unpack(f"<{_count(column)}i", column)]


def _floats(column: bytes) -> list[float]:
    return [*struct.unpack(f"<{_count(column)}f", column)]


def _count(column: bytes) -> int:
    """Return the number of values in a column. Raises ValueError if the last one is incomplete."""
    count, rest = divmod(len(column), 4)
    if rest:
        raise ValueError("a column of the response ends within a value")
    return count


def _encode_row(work: WorkItem) -> pb.OpenRow:
    sequence = work.sequence
    stopping = sequence.stopping
    details = sequence.details
    grammar = sequence.grammar
    return pb.OpenRow(
        row=work.row,
        token_ids=_pack(sequence.token_ids),
        prompt_len=sequence.prompt_len,
        eos_token_ids=_pack(sorted(stopping.eos_token_ids)),
        max_new_tokens=stopping.max_new_tokens,
        sampling=_encode_sampling(sequence),
        details=pb.Details(
            logprobs=details.logprobs,
            ranks=details.ranks,
            top_n=details.top_n,
            input_tokens=not sequence.inputs_reported,
            input_from=sequence.num_inputs_reported,
            raw=details.raw,
        ),
        adapter_digest=_digest(sequence.adapters.lora),
        prompt_digest=_digest(sequence.adapters.soft_prompt),
        grammar=None if grammar is None else pb.Grammar(text=grammar.text, digest=grammar.digest),
        encoder_token_ids=_pack(sequence.encoder_token_ids),
        cross_blocks=_pack(sequence.cross_blocks),
        is_encoded=bool(sequence.cross_blocks) and not sequence.num_to_encode,
        state_slot=sequence.state_slot or 0,
        state_source=_encode_slot(sequence.state_source),
    )


def _encode_slot(slot: int | None) -> int:
    return -1 if slot is None else slot


def _encode_sampling(sequence: Sequence) -> pb.Sampling:
    sampling = sequence.sampling
    return pb.Sampling(
        min_new_tokens=sequence.stopping.min_new_tokens,
        bias_token_ids=_pack([token_id for token_id, _ in sampling.logit_bias]),
        biases=np.array([bias for _, bias in sampling.logit_bias], "<f4").tobytes(),
        # All other fields have the same names in both messages.
        **{name: value for name, value in vars(sampling).items() if name != "logit_bias"},
    )


def _digest(info: AdapterInfo | None) -> str:
    return "" if info is None else info.digest


def _read_path(response: pb.StepResponse) -> str:
    if not response.path:
        return ""
    return pb.StepPath.Name(response.path).removeprefix("STEP_PATH_").lower()


def _read_proposed(step: Step, response: pb.StepResponse) -> dict[int, int]:
    """Return the number of drafts that the shards proposed, by row; empty if they proposed none."""
    if not response.num_drafts:
        return {}
    proposed = dict(zip(_integers(response.rows), _integers(response.num_drafts), strict=True))
    max_proposed = {item.row: item.drafts.max_proposed for item in step.work}
    if any(not 0 <= count <= max_proposed[row] for row, count in proposed.items()):
        raise ValueError("the response has more drafts than allowed")
    return proposed


def _draft_results(step: Step, response: pb.StepResponse, proposed: dict[int, int]) -> Iterator[DraftResult]:
    rows = _integers(response.rows)
    counts = dict(zip(rows, _integers(response.num_tokens) or [1] * len(rows), strict=True))
    for item in step.work:
        num_drafts = len(item.drafts.token_ids) + proposed.get(item.row, 0)
        if num_drafts:
            yield DraftResult(item.sequence, num_drafts, max(counts.get(item.row, 0) - 1, 0))


def _sampled(step: Step, response: pb.StepResponse) -> list[SampledToken]:
    """Return the tokens of a step without drafts, at most one per row that samples."""
    sampling = {row: sequence for sequence, row, _, _, samples, *_ in step.work if samples}
    sequences = [*map(sampling.pop, _integers(response.rows))]
    token_ids = _integers(response.token_ids)
    if token_ids and min(token_ids) < 0:
        raise ValueError("the response has a token that cannot have been sampled")
    if not response.logprobs and not response.ranks and not response.top_tokens.counts:
        tokens = [*map(TokenDetail, token_ids)]
    else:
        columns = zip(token_ids, *_detail_columns(response, len(sequences)), strict=True)
        tokens = [_token(sequence, *values) for sequence, values in zip(sequences, columns, strict=True)]
    if not len(sequences) == len(tokens) == len(response.ended):
        raise ValueError("the columns of the response have different lengths")
    return [*map(SampledToken, sequences, tokens, map(bool, response.ended))]


def _drafted(step: Step, response: pb.StepResponse, proposed: dict[int, int]) -> Iterator[SampledToken]:
    """Yield the tokens of a step with drafts. A row has one more token for each accepted draft."""
    sequences = {item.row: item.sequence for item in step.work}
    remaining = {
        item.row: item.samples + len(item.drafts.token_ids) + proposed.get(item.row, 0) for item in step.work
    }
    token_ids = _integers(response.token_ids)
    rows, ends = _tokens_rows(response, len(token_ids))
    columns = zip(rows, token_ids, ends, *_detail_columns(response, len(rows)), strict=True)
    for row, token_id, ended, logprob, rank, top in columns:
        sequence = sequences[row]
        remaining[row] -= 1
        if token_id < 0 or remaining[row] < 0:
            raise ValueError("the response has a token that its row cannot have sampled")
        yield SampledToken(sequence, _token(sequence, token_id, logprob, rank, top), bool(ended))


def _token(sequence: Sequence, token_id: int, logprob: float, rank: int, top: TopTokens) -> TokenDetail:
    if not sequence.details.generated_tokens:
        return TokenDetail(token_id)
    return _detail(sequence.details, token_id, logprob, rank, top)


def _tokens_rows(response: pb.StepResponse, num_tokens: int) -> tuple[list[int], Iterable[int]]:
    """Return each token's row, and whether the token ends the row, which only its last token can."""
    rows = _integers(response.rows)
    if not response.num_tokens:
        return rows, response.ended
    counts = _integers(response.num_tokens)
    if min(counts) < 1 or sum(counts) != num_tokens:
        raise ValueError("the counts of tokens do not match the tokens")
    rows_of_tokens = [row for row, count in zip(rows, counts, strict=True) for _ in range(count)]
    ends: list[int] = []
    for ended, count in zip(response.ended, counts, strict=True):
        ends += [*[0] * (count - 1), ended]
    return rows_of_tokens, ends


def _input_details(sequence: Sequence, message: pb.InputDetails) -> InputDetails:
    token_ids = sequence.token_ids[message.start : message.start + message.count]
    columns = zip(token_ids, *_detail_columns(message, message.count), strict=True)
    return InputDetails(sequence, message.start, [_detail(sequence.details, *values) for values in columns])


def _detail_columns(
    message: pb.StepResponse | pb.InputDetails, count: int
) -> tuple[list[float], list[int], list[TopTokens]]:
    """Return logprobs, ranks and top tokens. Columns that no row requested are filled with 0 or ()."""
    return (
        _floats(message.logprobs) or [0.0] * count,
        _integers(message.ranks) or [0] * count,
        _top_tokens(message.top_tokens) or [()] * count,
    )


def _detail(details: Details, token_id: int, logprob: float, rank: int, top: TopTokens) -> TokenDetail:
    """Keep the details that this sequence requested. The shards fill a column for all rows if one requests
    it."""
    return TokenDetail(
        token_id,
        logprob if details.logprobs else 0.0,
        rank if details.ranks else 0,
        top if details.top_n else (),
    )


def _top_tokens(message: pb.TopTokens) -> list[TopTokens]:
    """Return the top tokens of each entry, or an empty list for an empty message."""
    counts = _integers(message.counts)
    pairs = list(zip(_integers(message.token_ids), _floats(message.logprobs), strict=True))
    if sum(counts) != len(pairs) or any(count < 0 for count in counts):
        raise ValueError("the counts of top tokens do not match the top tokens")
    rest = iter(pairs)
    return [tuple(islice(rest, count)) for count in counts]
