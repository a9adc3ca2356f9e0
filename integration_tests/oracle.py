"""What a service must answer, field by field: scores from transformers, tokens from `tokenizers`, and the
rules of sampling, stopping and text as plain Python. No batches, no cache of keys, and no code of `tgis`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from integration_tests.first_error import Server, first_error, is_greedy
from integration_tests.served_models import MAX_NEW_TOKENS, MAX_SEQUENCE_LENGTH, Served
from tests import plain_sampling, plain_text
from tests.plain_sampling import Row
from tgis.pb import generation_pb2 as pb

# Nearer than this, another way of adding up the same numbers may decide otherwise.
LEAST_MARGIN, LEAST_ORDER, LEAST_MASS, LEAST_GAP = 1e-4, 2e-5, 1e-5, 4e-6

Ids = tuple[int, ...]


class UncertainError(Exception):
    """The rules do not tell the answer: two scores are too close."""


@dataclass(frozen=True)
class Generation:
    """One input's whole answer, before it is put into messages."""

    input_ids: Ids
    ids: list[int]
    tokens: list[pb.TokenInfo]
    entries: list[plain_text.Entry]
    """What each of the tokens shows in a stream."""


class Oracle:
    def __init__(self, served: Served) -> None:
        self.served, self.tokenizer = served, served.tokenizer
        self.server = Server(MAX_SEQUENCE_LENGTH, MAX_NEW_TOKENS)
        self._rows: dict[tuple[Ids, Ids], list[float]] = {}
        self._encoded: dict[Ids, BaseModelOutput] = {}
        self._generations: dict[tuple[str, bytes, int], Generation] = {}

    @property
    def is_encoder_decoder(self) -> bool:
        return self.served.decoder_start_id is not None

    @cached_property
    def model(self) -> PreTrainedModel:
        kind = AutoModelForSeq2SeqLM if self.is_encoder_decoder else AutoModelForCausalLM
        return kind.from_pretrained(self.served.directory, dtype=torch.float32).eval()

    def error(self, request: pb.BatchedGenerationRequest | pb.SingleGenerationRequest) -> str | None:
        """What the request is refused with."""
        single = isinstance(request, pb.SingleGenerationRequest)
        inputs = [request.request] if single else request.requests
        return first_error(
            request.params,
            self.server,
            [len(self.input_ids(item.text, request.params.truncate_input_tokens)) for item in inputs],
            request.prefix_id if request.HasField("prefix_id") else None,
            request.adapter_id if request.HasField("adapter_id") else None,
        )

    def unary(self, text: str, params: pb.Parameters, seed: int) -> pb.GenerationResponse:
        generation = self.generate(text, params, seed)
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
            input_tokens=self._input_tokens(generation.input_ids, asked) if asked.input_tokens else [],
        )

    def _echo(self, text: str, asked: pb.ResponseOptions) -> str:
        gap = "\n\n" if self.is_encoder_decoder else ""
        return text + gap if asked.input_text else ""

    def stream(self, text: str, params: pb.Parameters, seed: int) -> list[pb.GenerationResponse]:
        generation = self.generate(text, params, seed)
        asked, seed = params.response, 0 if is_greedy(params) else seed
        count = len(generation.input_ids)
        header = text if asked.input_text else ""
        messages = [pb.GenerationResponse(input_token_count=count, seed=seed, text=header)]
        if asked.input_tokens:
            tokens = self._input_tokens(generation.input_ids, asked)
            messages.append(pb.GenerationResponse(input_token_count=len(tokens), input_tokens=tokens))
        for i, (shown, reason, stop_sequence) in enumerate(generation.entries):
            is_last = i == len(generation.entries) - 1
            if shown or is_last or asked.generated_tokens:
                messages.append(
                    pb.GenerationResponse(
                        generated_token_count=i + 1,
                        text=shown,
                        stop_reason=reason,
                        stop_sequence=stop_sequence,
                        seed=seed if is_last else 0,
                        tokens=[generation.tokens[i]] if asked.generated_tokens else [],
                    )
                )
        return messages

    def generate(self, text: str, params: pb.Parameters, seed: int) -> Generation:
        key = text, params.SerializeToString(deterministic=True), seed
        if key not in self._generations:
            self._generations[key] = self._generate(text, params, seed)
        return self._generations[key]

    def _generate(self, text: str, params: pb.Parameters, seed: int) -> Generation:
        prompt = self.input_ids(text, params.truncate_input_tokens)
        wanted, room = params.stopping.max_new_tokens or 20, MAX_SEQUENCE_LENGTH - len(prompt)
        limit, minimum = min(wanted, room), params.stopping.min_new_tokens
        include = params.stopping.include_stop_sequence
        row = _row(params, seed, self.served.eos_ids)
        encoder_ids, before = (prompt, (self._start_id,)) if self.is_encoder_decoder else ((), prompt)
        ids: list[int] = []
        tokens: list[pb.TokenInfo] = []
        while len(ids) < limit:
            row.token_ids, row.num_generated = [*before, *ids], len(ids)
            row.logits = self.logits((*before, *ids), encoder_ids)
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
        return Generation(prompt, ids, tokens[: len(entries)], entries)

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
        told = [token_id] if asked.token_ranks else []
        if plain_sampling.least_gap(scores, told + top) < LEAST_GAP:
            raise UncertainError("the rank of a token")
        logprobs = plain_sampling.logprobs(scores)
        if asked.token_logprobs:
            info.logprob = logprobs[token_id]
        if asked.token_ranks:
            info.rank = plain_sampling.rank(scores, token_id)
        for i in top if asked.token_logprobs else sorted(top):
            info.top_tokens.add(text=self.piece(i), logprob=logprobs[i] if asked.token_logprobs else 0)
        return info

    def _input_tokens(self, ids: Ids, asked: pb.ResponseOptions) -> list[pb.TokenInfo]:
        unknown = math.nan if asked.token_logprobs else 0
        if self.is_encoder_decoder:  # nothing predicts what an encoder reads
            return [pb.TokenInfo(text=self.piece(token_id), logprob=unknown) for token_id in ids]
        first = pb.TokenInfo(text=self.piece(ids[0]), logprob=unknown)
        others = [self._describe(ids[i], self.logits(ids[:i]), asked) for i in range(1, len(ids))]
        return [first, *others]

    @torch.inference_mode()
    def logits(self, ids: Ids, encoder_ids: Ids = ()) -> list[float]:
        """Of the token after these; one pass over all of them gives those before, too."""
        if (encoder_ids, ids) not in self._rows:
            inputs = torch.tensor([ids])
            if encoder_ids:
                encoded = self._encode(encoder_ids)
                logits = self.model(encoder_outputs=encoded, decoder_input_ids=inputs).logits
            else:
                logits = self.model(inputs).logits
            for i, row in enumerate(logits[0].tolist(), start=1):
                self._rows.setdefault((encoder_ids, ids[:i]), row)
        return self._rows[encoder_ids, ids]

    def _encode(self, ids: Ids) -> BaseModelOutput:
        if ids not in self._encoded:
            self._encoded[ids] = self.model.get_encoder()(torch.tensor([ids]))
        return self._encoded[ids]

    def input_ids(self, text: str, limit: int) -> Ids:
        """The last ones, of which a beginning-of-text token takes the first place."""
        ids = self.tokenizer.encode(text).ids
        if 0 < limit < len(ids):
            begin = [] if self.is_encoder_decoder else [self.tokenizer.token_to_id("<s>")]
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
    """The defaults of the wire, given their meaning."""
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
