"""Writes the public messages from the engine's events, in the shapes that TGIS's clients expect."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tgis.pb import generation_pb2 as pb
from tgis.router.events import InputTokens, Output
from tgis.router.sequence import Details, Sequence, StopReason, TokenDetail
from tgis.router.text.tokenizer import Tokenizer

_NOT_FINISHED = StopReason.NOT_FINISHED  # looked up once, because every token needs it


@dataclass
class Result:
    """A whole generation, collected for a unary answer."""

    sequence: Sequence
    text: list[str] = field(default_factory=list)
    tokens: list[TokenDetail] = field(default_factory=list)
    input_tokens: tuple[TokenDetail, ...] = ()
    last: Output | None = None

    def add(self, event: InputTokens | Output) -> None:
        if isinstance(event, InputTokens):
            self.input_tokens = event.tokens
            return
        self.text.append(event.text)
        self.last = event
        if event.token is not None and self.sequence.details.generated_tokens:
            self.tokens.append(event.token)


class ResponseWriter:
    """Writer of answers. Token texts are the vocabulary's own pieces."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def unary(self, result: Result, echo: str) -> pb.GenerationResponse:
        """Return a unary answer. Its text begins with `echo`, which is empty unless it was asked for."""
        sequence, last = result.sequence, result.last
        assert last is not None, "a generation ends with an output"
        is_empty = not last.num_generated  # expired before anything was computed: only the reason is told
        return pb.GenerationResponse(
            input_token_count=sequence.num_input_tokens,
            generated_token_count=last.num_generated,
            text="" if is_empty else echo + "".join(result.text),
            stop_reason=last.reason.name,
            stop_sequence=last.stop_sequence,
            seed=0 if is_empty else sequence.sampling.seed,
            tokens=self._token_infos(result.tokens, sequence.details),
            input_tokens=self._token_infos(result.input_tokens, sequence.details),
        )

    def header(self, sequence: Sequence, input_text: str) -> pb.GenerationResponse:
        """Return the first message of a stream, which is sent before anything is computed."""
        return pb.GenerationResponse(
            input_token_count=sequence.num_input_tokens, seed=sequence.sampling.seed, text=input_text
        )

    def message(self, event: InputTokens | Output, sequence: Sequence) -> pb.GenerationResponse | None:
        """Return the event's message; None for a token without text if tokens were not asked for."""
        details = sequence.details
        if isinstance(event, InputTokens):
            infos = self._token_infos(event.tokens, details)
            return pb.GenerationResponse(input_tokens=infos, input_token_count=len(infos))
        is_last = event.reason is not _NOT_FINISHED
        if not is_last and not details.generated_tokens:
            if not event.text:
                return None
            return pb.GenerationResponse(generated_token_count=event.num_generated, text=event.text)
        tokens = [event.token] if event.token is not None and details.generated_tokens else []
        return pb.GenerationResponse(
            generated_token_count=event.num_generated,
            text=event.text,
            stop_reason=event.reason.name,
            stop_sequence=event.stop_sequence,
            seed=sequence.sampling.seed if is_last and event.num_generated else 0,
            tokens=self._token_infos(tokens, details),
        )

    def _token_infos(self, tokens: Iterable[TokenDetail], details: Details) -> list[pb.TokenInfo]:
        return [
            pb.TokenInfo(
                text=self._tokenizer.piece(token.token_id),
                logprob=token.logprob,
                rank=token.rank,
                top_tokens=self._top_tokens(token, details.logprobs),
            )
            for token in tokens
        ]

    def _top_tokens(self, token: TokenDetail, with_logprobs: bool) -> list[pb.TokenInfo.TopToken]:
        """Return the top tokens by probability if that is shown, else by token id."""
        top = token.top_tokens if with_logprobs else sorted(token.top_tokens)
        return [
            pb.TokenInfo.TopToken(
                text=self._tokenizer.piece(token_id), logprob=logprob if with_logprobs else 0.0
            )
            for token_id, logprob in top
        ]
