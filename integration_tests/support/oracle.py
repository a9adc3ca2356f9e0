"""Computes a service's expected response, field by field: scores from transformers and PEFT, tokens from
`tokenizers`, and the rules of sampling, stopping and text in plain Python. It has no batches, no KV cache,
and no code of `tgis`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from transformers import PreTrainedModel

from integration_tests.support.first_error import Server, first_error, is_greedy, length_of
from integration_tests.support.scorer import PLAIN, Ids, Scorer, Tuned
from integration_tests.support.served_models import MAX_NEW_TOKENS, MAX_SEQUENCE_LENGTH, Served
from tests.support import plain_sampling, plain_text
from tests.support.plain_sampling import Row
from tgis.pb import generation_pb2 as pb

# Closer scores may be ordered differently by another order of summation.
LEAST_MARGIN, LEAST_ORDER, LEAST_MASS, LEAST_GAP = 1e-4, 2e-5, 1e-5, 4e-6

Request = pb.BatchedGenerationRequest | pb.SingleGenerationRequest


class UncertainError(Exception):
    """Error for a response that the rules do not determine: two scores are too close."""


@dataclass(frozen=True)
class Generation:
    """Whole response to one input, before it is put into messages."""

    input_ids: Ids
    """Number of input tokens without virtual tokens."""
    ids: list[int]
    tokens: list[pb.TokenInfo]
    entries: list[plain_text.Entry]
    """Text that each of the tokens shows in a stream."""


class Oracle:
    def __init__(self, served: Served) -> None:
        self.served, self.tokenizer = served, served.tokenizer
        self.server = Server(MAX_SEQUENCE_LENGTH, MAX_NEW_TOKENS, names=served.store.names)
        self._scorer = Scorer(served)
        self._generations: dict[tuple[str, bytes, int, Tuned], Generation] = {}

    @property
    def model(self) -> PreTrainedModel:
        """Scores without an adapter."""
        return self._scorer.model(PLAIN)

    def logits(self, ids: Ids) -> list[float]:
        """Return the scores of the token after these, without a soft prompt and an adapter."""
        return self._scorer.logits(ids)

    @property
    def is_encoder_decoder(self) -> bool:
        return self.served.decoder_start_id is not None

    def tuned(self, request: Request) -> Tuned:
        """Return the soft prompt and adapter of the request's ids."""
        adapters = Tuned(request.prefix_id, request.adapter_id)
        if adapters.prompt in self.served.store.adapters:
            return replace(adapters, prompt="", adapter=adapters.prompt)
        return adapters

    def error(self, request: Request) -> str | None:
        """Return the expected error of the request."""
        single = isinstance(request, pb.SingleGenerationRequest)
        inputs = [request.request] if single else request.requests
        return first_error(
            request.params,
            self.server,
            [length_of(self.tokenizer, item.text, request.params.truncate_input_tokens) for item in inputs],
            request.prefix_id if request.HasField("prefix_id") else None,
            request.adapter_id if request.HasField("adapter_id") else None,
        )

    def unary(
        self, text: str, params: pb.Parameters, seed: int, tuned: Tuned = PLAIN
    ) -> pb.GenerationResponse:
        generation = self.generate(text, params, seed, tuned)
        _, reason, stop_sequence = generation.entries[-1]
        asked = params.response
        return pb.GenerationResponse(
            input_token_count=len(generation.input_ids),
            generated_token_count=len(generation.entries),
            text=self._echo(text, asked) + "".join(entry[0] for entry in generation.entries),
            stop_reason=reason,
            stop_sequence=stop_sequence,
            seed=0 if is_greedy(params) else seed,
            tokens=generation.tokens if asked.generated_tokens else [],
            input_tokens=self._input_tokens(generation.input_ids, asked, tuned) if asked.input_tokens else [],
        )

    def _echo(self, text: str, asked: pb.ResponseOptions) -> str:
        gap = "\n\n" if self.is_encoder_decoder else ""
        return text + gap if asked.input_text else ""

    def stream(
        self,
        text: str,
        params: pb.Parameters,
        seed: int,
        got: Sequence[pb.GenerationResponse],
        tuned: Tuned = PLAIN,
    ) -> list[pb.GenerationResponse]:
        """Return the messages of a stream. Tokens in one message of `got` are in one message here too."""
        generation = self.generate(text, params, seed, tuned)
        asked, seed = params.response, 0 if is_greedy(params) else seed
        count = len(generation.input_ids)
        header = text if asked.input_text else ""
        messages = [pb.GenerationResponse(input_token_count=count, seed=seed, text=header)]
        if asked.input_tokens:
            tokens = self._input_tokens(generation.input_ids, asked, tuned)
            messages.append(pb.GenerationResponse(input_token_count=len(tokens), input_tokens=tokens))
        ends = {each.generated_token_count for each in got} - {0} | {len(generation.entries)}
        for begin, end in pairwise([0, *sorted(ends)]):
            entries = generation.entries[begin:end]
            _, reason, stop_sequence = entries[-1]
            messages.append(
                pb.GenerationResponse(
                    generated_token_count=end,
                    text="".join(shown for shown, _, _ in entries),
                    stop_reason=reason,
                    stop_sequence=stop_sequence,
                    seed=seed if end == len(generation.entries) else 0,
                    tokens=generation.tokens[begin:end] if asked.generated_tokens else [],
                )
            )
        return messages

    def generate(self, text: str, params: pb.Parameters, seed: int, tuned: Tuned = PLAIN) -> Generation:
        key = text, params.SerializeToString(deterministic=True), seed, tuned
        if key not in self._generations:
            self._generations[key] = self._generate(text, params, seed, tuned)
        return self._generations[key]

    def _generate(self, text: str, params: pb.Parameters, seed: int, tuned: Tuned) -> Generation:
        inputs = self.input_ids(text, params.truncate_input_tokens)
        virtual, room = self._scorer.virtual_ids(tuned), MAX_SEQUENCE_LENGTH - len(inputs)
        room -= self.server.names.prefix_length(tuned.prompt)
        wanted, minimum = params.stopping.max_new_tokens or 20, params.stopping.min_new_tokens
        limit = min(wanted, room)
        include = params.stopping.include_stop_sequence
        row = _row(params, seed, self.served.eos_ids)
        encoder_ids = self._scorer.encoder_ids(inputs, tuned)
        before = (self._start_id,) if self.is_encoder_decoder else inputs
        ids: list[int] = []
        tokens: list[pb.TokenInfo] = []
        while len(ids) < limit:
            # Virtual tokens have positions, but penalties do not apply to them.
            places = [before[0]] * len(virtual)
            row.token_ids, row.num_generated = [*places, *before, *ids], len(ids)
            row.logits = self._scorer.logits((*virtual, *before, *ids), encoder_ids, tuned)
            token_id, info = self._next(row, params.response)
            ids.append(token_id)
            tokens.append(info)
            if token_id in self.served.eos_ids and len(ids) >= minimum:
                break
        entries = plain_text.stream(
            self.tokenizer,
            ids,
            stop_sequences=list(params.stopping.stop_sequences),
            include=(
                include
                if params.stopping.HasField("include_stop_sequence")
                else self.served.include_stop_sequence
            ),
            min_new_tokens=minimum,
            max_new_tokens=limit,
            reduced=limit < wanted,
            eos_ids=self.served.eos_ids,
            output_special_tokens=self.served.output_special_tokens,
            begins=self.is_encoder_decoder,
        )
        return Generation(inputs, ids, tokens[: len(entries)], entries)

    def _next(self, row: Row, asked: pb.ResponseOptions) -> tuple[int, pb.TokenInfo]:
        scores = plain_sampling.process(row)
        token_id, margin = plain_sampling.choose(row, scores.values)
        order = min(scores.order, scores.typical_order)
        if margin < LEAST_MARGIN or order < LEAST_ORDER or scores.mass < LEAST_MASS:
            raise UncertainError(f"token {row.num_generated + 1}: {margin=} {order=} {scores.mass=}")
        return token_id, self._describe(token_id, scores.values, asked)

    def _describe(self, token_id: int, scores: Sequence[float], asked: pb.ResponseOptions) -> pb.TokenInfo:
        info = pb.TokenInfo(text=self.piece(token_id))
        top = plain_sampling.best_tokens(scores, asked.top_n_tokens)
        returned = [token_id] if asked.token_ranks else []
        if plain_sampling.least_gap(scores, returned + top) < LEAST_GAP:
            raise UncertainError("the rank of a token")
        logprobs = plain_sampling.logprobs(scores)
        if asked.token_logprobs:
            info.logprob = logprobs[token_id]
        if asked.token_ranks:
            info.rank = plain_sampling.rank(scores, token_id)
        for i in top if asked.token_logprobs else sorted(top):
            info.top_tokens.add(text=self.piece(i), logprob=logprobs[i] if asked.token_logprobs else 0)
        return info

    def _input_tokens(self, ids: Ids, asked: pb.ResponseOptions, tuned: Tuned) -> list[pb.TokenInfo]:
        """Return the input tokens, with a soft prompt's as padding."""
        unknown = math.nan if asked.token_logprobs else 0
        if self.is_encoder_decoder:  # nothing predicts the tokens of an encoder's input
            ids = self._scorer.encoder_ids(ids, tuned)
            return [pb.TokenInfo(text=self.piece(token_id), logprob=unknown) for token_id in ids]
        ids = (*self._scorer.virtual_ids(tuned), *ids)
        first = pb.TokenInfo(text=self.piece(ids[0]), logprob=unknown)
        others = [
            self._describe(ids[i], self._scorer.logits(ids[:i], tuned=tuned), asked)
            for i in range(1, len(ids))
        ]
        return [first, *others]

    def input_ids(self, text: str, limit: int) -> Ids:
        """Keep the last tokens, after the special tokens that begin every text."""
        ids = self.tokenizer.encode(text).ids
        if 0 < limit < len(ids):
            begin = plain_text.begin_of_all(self.tokenizer, ["", "a", "b"])
            ids = [*begin, *ids[len(ids) - limit + len(begin) :]]
        return tuple(ids)

    @property
    def _start_id(self) -> int:
        assert self.served.decoder_start_id is not None
        return self.served.decoder_start_id

    def piece(self, token_id: int) -> str:
        return self.tokenizer.id_to_token(token_id) or ""

    def tokenize(self, request: pb.BatchedTokenizeRequest) -> pb.BatchedTokenizeResponse:
        return pb.BatchedTokenizeResponse(
            responses=[self._tokenize(item.text, request) for item in request.requests]
        )

    def _tokenize(self, text: str, request: pb.BatchedTokenizeRequest) -> pb.TokenizeResponse:
        encoding = self.tokenizer.encode(text)
        last = slice(-request.truncate_input_tokens or None, None)
        response = pb.TokenizeResponse(token_count=len(encoding.ids[last]))
        if request.return_tokens:
            response.tokens.extend(encoding.tokens[last])
        if request.return_offsets:
            for start, end in encoding.offsets[last]:
                response.offsets.add(start=len(text[:start].encode()), end=len(text[:end].encode()))
        return response

    def model_info(self) -> pb.ModelInfoResponse:
        kinds = pb.ModelInfoResponse
        return pb.ModelInfoResponse(
            model_kind=kinds.ENCODER_DECODER if self.is_encoder_decoder else kinds.DECODER_ONLY,
            max_sequence_length=MAX_SEQUENCE_LENGTH,
            max_new_tokens=MAX_NEW_TOKENS,
        )


def _row(params: pb.Parameters, seed: int, eos_ids: Sequence[int]) -> Row:
    """Return the parameters with the defaults of the wire applied."""
    sampling, decoding = params.sampling, params.decoding
    row = Row(
        [],
        [],
        eos=list(eos_ids),
        greedy=is_greedy(params),
        seed=seed,
        repetition_penalty=decoding.repetition_penalty or 1.0,
        min_new_tokens=params.stopping.min_new_tokens,
    )
    if decoding.HasField("length_penalty"):
        row.length_penalty_start = decoding.length_penalty.start_index
        row.length_penalty_factor = decoding.length_penalty.decay_factor
    if not row.greedy:
        row.temperature = sampling.temperature if sampling.HasField("temperature") else 1.0
        row.top_k, row.top_p = sampling.top_k, sampling.top_p or 1.0
        row.typical_p = sampling.typical_p if sampling.typical_p > 0 else 1.0
    return row
