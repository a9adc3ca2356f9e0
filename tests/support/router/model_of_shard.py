"""Independent implementation of shard.proto's steps in plain Python. The next token is a function of the
whole prefix, the encoder's input, the length that switches rotary frequencies, the soft prompt and the
adapter. Every cache slot records what was computed into it. Any error in scheduling, sharing or bookkeeping
therefore changes a result or fails an assertion."""

import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from tgis.pb import shard_pb2 as pb

EOS = 0


def context(encoder_ids: list[int], is_long: bool, digests: str = "") -> int:
    """Return a number for all inputs of the decoder's computation but its own tokens. `digests` has the
    digests of adapter and prompt, separated by a slash."""
    if not (encoder_ids or is_long or digests):
        return 0
    return zlib.crc32(array("i", [is_long, *encoder_ids]).tobytes() + digests.encode())


def join_digests(adapter: str, prompt: str) -> str:
    return f"{adapter}/{prompt}" if adapter or prompt else ""


def next_token(prefix: list[int], vocab_size: int, seed: int = 0) -> int:
    """Return the next token. `seed` is the context."""
    return zlib.crc32(array("i", prefix).tobytes(), seed) % vocab_size


def fold(sampling_seed: int) -> int:
    """Fold a seed of 64 bits to 32 bits; zero stays zero."""
    return (sampling_seed ^ sampling_seed >> 32) % 2**32


def truth(
    prompt: list[int],
    max_new_tokens: int,
    vocab_size: int,
    encoder_ids: list[int] | None = None,
    switch_len: int = 0,
    digests: str = "",
    sampling_seed: int = 0,
) -> list[int]:
    """Return all tokens of an undisturbed sequence. `sampling_seed` matters with `uses_seeds`."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_new_tokens:
        seed = context(encoder_ids or [], 0 < switch_len < len(tokens), digests)
        tokens.append(next_token(tokens, vocab_size, seed ^ fold(sampling_seed)))
        if tokens[-1] == EOS:
            break
    return tokens


def integers(column: bytes) -> list[int]:
    return array("i", column).tolist()


def column(values: list[int]) -> bytes:
    return array("i", values).tobytes()


def reals(values: Iterable[float]) -> bytes:
    return array("f", values).tobytes()


@dataclass
class Row:
    token_ids: list[int]
    limit: int
    eos: list[int]
    details: pb.Details
    prompt_len: int
    min_new_tokens: int
    encoder_ids: list[int]
    cross_blocks: list[int]
    is_long: bool
    digests: str
    sampling_seed: int
    state_slot: int
    block_table: list[int] = field(default_factory=list)
    ended: bool = False
    is_refused: bool = False

    @property
    def context(self) -> int:
        return context(self.encoder_ids, self.is_long, self.digests)


class ModelOfShard:
    def __init__(
        self, num_blocks: int, block_size: int, vocab_size: int, switch_len: int = 0, num_states: int = 0
    ) -> None:
        self.num_blocks, self.block_size, self.vocab_size = num_blocks, block_size, vocab_size
        self.switch_len, self.num_states = switch_len, num_states
        self.states: dict[int, int] = {}
        """Number of the prefix whose state is in a slot."""
        self.num_resumed = 0
        """Number of rows that continued from a snapshot."""
        self.rows: dict[int, Row] = {}
        self.cache: dict[tuple[int, int], object] = {}
        self.num_holders: Counter[int] = Counter()
        self.num_computed = self.num_encoded = self.num_long = 0
        self.last_step = -1
        self.refuses: Callable[[pb.OpenRow], bool] = lambda message: False
        self.propose: Callable[[Row, int], list[int]] | None = None
        """Function that proposes up to a number of drafts for a row."""
        self.num_proposed = self.num_right = 0
        self.script: list[int] | None = None
        """Tokens of every row, which replace those computed from its prefix."""
        self.logprob_of: Callable[[int], float] | None = None
        """Function that returns the log-probability of each token, also for top tokens."""
        self.uses_seeds = False
        """True if the tokens of rows that sample depend on their seeds."""
        self.check_contents: Callable[[pb.OpenRow], None] = lambda message: None
        """Function that asserts that a row's adapters are loaded and that its virtual tokens are present."""

    def execute(self, request: pb.StepRequest) -> pb.StepResponse:
        assert request.step_id > self.last_step
        self.last_step = request.step_id
        for number in integers(request.closed_rows):
            row = self.rows.pop(number)
            self.num_holders.subtract([*row.cross_blocks, *row.block_table])
        refused = [message.row for message in request.opened_rows if not self._open(message)]
        new_blocks, draft_ids = iter(integers(request.new_blocks)), iter(integers(request.draft_ids))
        columns = [*map(integers, (request.rows, request.starts, request.ends, request.num_new_blocks))]
        columns.append(integers(request.num_drafts) or [0] * len(columns[0]))
        columns.append(integers(request.max_drafts) or [0] * len(columns[0]))
        work = zip(*columns, strict=True)
        sampled: list[tuple[int, list[int], bool, int]] = []
        details: list[pb.InputDetails] = []
        for number, start, end, num_new, num_drafts, max_drafts in work:
            row = self.rows[number]
            added = [next(new_blocks) for _ in range(num_new)]
            row.block_table += added
            self.num_holders.update(added)
            drafts = [next(draft_ids) for _ in range(num_drafts)]
            assert not (num_drafts and max_drafts)
            max_tokens = num_drafts + max_drafts
            assert end + max_tokens < row.limit, "the router never schedules past a limit"
            assert len(row.block_table) * self.block_size >= end + max_tokens, "nor past the blocks"
            if row.ended:
                assert not drafts or row.is_refused, "what speculates has no unanswered token"
                continue
            if max_drafts:
                assert self.propose is not None, "a shard without a proposer is never asked for drafts"
                assert start + 1 == end == len(row.token_ids)
                drafts = self.propose(row, max_drafts)
                self.num_proposed += len(drafts)
            self._compute(row, start, end, drafts)
            details += self._input_details(number, row, start, end)
            if end == len(row.token_ids):
                tokens = list(self._sample(row, drafts))
                self.num_right += len(tokens) - 1
                sampled.append((number, tokens, row.ended, len(drafts) if max_drafts else 0))
            else:
                assert not drafts
        assert next(new_blocks, None) is next(draft_ids, None) is None
        self._save_states(request)
        rows, tokens, ended, proposed = zip(*sampled, strict=True) if sampled else ((), (), (), ())
        counts = list(map(len, tokens))
        response = pb.StepResponse(
            step_id=request.step_id,
            digest=zlib.crc32(repr(sampled).encode()),
            forward_ns=1000,
            rows=column(list(rows)),
            num_tokens=column(counts) if sum(counts) > len(counts) else b"",
            num_drafts=column(list(proposed)) if any(proposed) else b"",
            token_ids=column([token for some in tokens for token in some]),
            ended=bytes(ended),
            input_details=details,
            errors=[pb.RowError(row=row, message="refused") for row in refused],
        )
        if self.logprob_of is not None:
            self._write_logprobs(response)
        return response

    def _write_logprobs(self, response: pb.StepResponse) -> None:
        """Write the log-probabilities. Top tokens are the lowest token ids; their number is the largest in
        any row's request."""
        assert self.logprob_of is not None
        token_ids, rows = integers(response.token_ids), integers(response.rows)
        response.logprobs = reals(map(self.logprob_of, token_ids))
        num_top = max((self.rows[row].details.top_n for row in rows), default=0)
        if num_top:
            top = list(range(num_top)) * len(token_ids)
            response.top_tokens.counts = column([num_top] * len(token_ids))
            response.top_tokens.token_ids = column(top)
            response.top_tokens.logprobs = reals(map(self.logprob_of, top))
        for part in response.input_details:
            ids = self.rows[part.row].token_ids[part.start : part.start + part.count]
            part.logprobs = reals(map(self.logprob_of, ids))

    def _sample(self, row: Row, drafts: list[int]) -> Iterator[int]:
        for draft in [*drafts, None]:
            token = self._next(row)
            row.token_ids.append(token)
            row.ended = token in row.eos or len(row.token_ids) == row.limit
            yield token
            if row.ended or token != draft:
                return

    def _next(self, row: Row) -> int:
        num_generated = len(row.token_ids) - row.prompt_len
        if self.script is not None:
            return self.script[num_generated]
        token = next_token(row.token_ids, self.vocab_size, row.context ^ fold(row.sampling_seed))
        # A real shard may choose any unmasked token here.
        return token + 1 if token in row.eos and num_generated < row.min_new_tokens else token

    def _open(self, message: pb.OpenRow) -> bool:
        assert message.row not in self.rows, "a row is closed before it is opened again"
        self.check_contents(message)
        token_ids = integers(message.token_ids)
        row = self.rows[message.row] = Row(
            token_ids,
            message.prompt_len + message.max_new_tokens,
            integers(message.eos_token_ids),
            message.details,
            message.prompt_len,
            message.sampling.min_new_tokens,
            integers(message.encoder_token_ids),
            integers(message.cross_blocks),
            0 < self.switch_len < len(token_ids),
            join_digests(message.adapter_digest, message.prompt_digest),
            message.sampling.seed if self.uses_seeds and not message.sampling.greedy else 0,
            message.state_slot,
        )
        if self.num_states:
            self._open_state(row, message.state_source)
        self.num_long += row.is_long
        self.num_holders.update(row.cross_blocks)
        assert len(row.cross_blocks) == -(-len(row.encoder_ids) // self.block_size)
        if self.refuses(message):
            row.ended = row.is_refused = True
        elif row.encoder_ids and not message.is_encoded:
            self._encode(row)
        return not row.ended

    def _open_state(self, row: Row, source: int) -> None:
        slots = [other.state_slot for other in self.rows.values()]
        assert slots.count(row.state_slot) == 1, "every row has a slot of its own"
        assert 0 <= row.state_slot < self.num_states
        self.states[row.state_slot] = row.context if source == -1 else self.states[source]
        self.num_resumed += source != -1

    def _save_states(self, request: pb.StepRequest) -> None:
        saves = integers(request.state_saves)
        assert self.num_states or not saves
        for number, slot in zip(integers(request.rows), saves, strict=False):
            if slot != -1:
                assert slot not in [row.state_slot for row in self.rows.values()], "no sequence has the slot"
                assert 0 <= slot < self.num_states
                self.states[slot] = self.states[self.rows[number].state_slot]

    def _encode(self, row: Row) -> None:
        self.num_encoded += len(row.encoder_ids)
        for position in range(len(row.encoder_ids)):
            self._write(row.cross_blocks, position, (row.digests, row.encoder_ids, position))

    def _compute(self, row: Row, start: int, end: int, drafts: list[int]) -> None:
        assert 0 <= start < end <= len(row.token_ids)
        end += len(drafts)
        assert len(row.block_table) * self.block_size >= end, "the block table covers what is computed"
        assert all(0 <= block < self.num_blocks for block in row.block_table)
        assert row.is_long or not self.switch_len or end <= self.switch_len, "a short row grew too long"
        self.num_computed += end - start
        for position in range(len(row.encoder_ids)):
            result = self._read(row.cross_blocks, position)
            assert result == (row.digests, row.encoder_ids, position), (
                "the cross blocks are not this encoder input's"
            )
        prefix = row.context
        for position, token in enumerate([*row.token_ids, *drafts][:end]):
            if self.num_states and position == start:
                assert self.states[row.state_slot] == prefix, "the state is of another prefix"
            prefix = zlib.crc32(array("q", [prefix, token]).tobytes())
            if position >= start:
                self._write(row.block_table, position, prefix)
            result = self._read(row.block_table, position)
            assert result == prefix, "a cached token is of another prefix"
        self.states[row.state_slot] = prefix

    def _read(self, blocks: list[int], position: int) -> object:
        return self.cache.get((blocks[position // self.block_size], position % self.block_size))

    def _write(self, blocks: list[int], position: int, value: object) -> None:
        block = blocks[position // self.block_size]
        assert self.num_holders[block] == 1, "what others read too is never written"
        self.cache[block, position % self.block_size] = value

    def _input_details(self, number: int, row: Row, start: int, end: int) -> list[pb.InputDetails]:
        if not row.details.input_tokens:
            return []
        assert not row.encoder_ids, "an encoder's input has no details"
        first = 0 if start == 0 else start + 1
        tokens = [i for i in range(first, min(end + 1, row.prompt_len)) if i >= row.details.input_from]
        if not tokens:
            return []
        ranks = column([0 if i == 0 else i for i in tokens])
        return [pb.InputDetails(row=number, start=tokens[0], count=len(tokens), ranks=ranks)]
