"""Writes the messages of Generate."""

from collections.abc import Iterable, Sequence

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tgis.router.api.service import Result
from tgis.router.api.vllm_engine.requests import LogprobCounts
from tgis.router.engine.handle import SequenceSpec
from tgis.router.events import InputTokens, Output
from tgis.router.sequence import StopReason, TokenDetail

ABORT = "abort"
FINISH_REASONS = {
    StopReason.EOS_TOKEN: "stop",
    StopReason.STOP_SEQUENCE: "stop",
    StopReason.CANCELLED: ABORT,
}
"""Finish reasons other than `length`."""


class GenerateWriter:
    def __init__(self, request: pb.GenerateRequest, counts: LogprobCounts) -> None:
        self._stop_token_ids = frozenset(request.sampling_params.stop_token_ids)
        self._counts = counts

    def chunk(self, index: int, spec: SequenceSpec, event: InputTokens | Output) -> pb.GenerateResponse:
        """Return the message for new tokens of the text with this index. Counts of tokens are those of this
        message, and the number of cached tokens is known only at the end."""
        response = pb.GenerateResponse()
        chunk = response.chunk
        chunk.prompt_tokens = len(spec.input_ids)
        chunk.index = index
        if isinstance(event, InputTokens):
            chunk.input_logprobs.CopyFrom(self._input_logprobs(event.tokens))
            return response
        chunk.token_ids.extend([token.token_id for token in event.tokens])
        chunk.completion_tokens = len(event.tokens)
        if self._counts.output is not None:
            chunk.output_logprobs.CopyFrom(self._output_logprobs(event.tokens))
        return response

    def complete(self, index: int, result: Result) -> pb.GenerateResponse:
        """Return the last message of a text, with all its tokens."""
        complete = self._complete(index, result)
        complete.finish_reason = self._describe_end(complete, result.last)
        return pb.GenerateResponse(complete=complete)

    def aborted(self, index: int, result: Result | None) -> pb.GenerateResponse:
        """Return the last message of a text that was aborted. It has no result if it was not admitted yet."""
        complete = pb.GenerateComplete(index=index) if result is None else self._complete(index, result)
        complete.finish_reason = ABORT
        return pb.GenerateResponse(complete=complete)

    def _complete(self, index: int, result: Result) -> pb.GenerateComplete:
        complete = pb.GenerateComplete(
            output_ids=result.token_ids,
            prompt_tokens=len(result.spec.input_ids),
            completion_tokens=len(result.token_ids),
            index=index,
        )
        if self._counts.output is not None:
            complete.output_logprobs.CopyFrom(self._output_logprobs(result.tokens))
        if self._counts.prompt is not None:
            complete.input_logprobs.CopyFrom(self._input_logprobs(result.input_tokens))
        return complete

    def _describe_end(self, complete: pb.GenerateComplete, last: Output | None) -> str:
        assert last is not None, "a generation ends with an output"
        complete.cached_tokens = last.num_cached
        if last.reason is StopReason.STOP_SEQUENCE:
            complete.matched_stop_str = last.stop_sequence
        elif last.reason is StopReason.EOS_TOKEN and complete.output_ids[-1] in self._stop_token_ids:
            complete.matched_token_id = complete.output_ids[-1]
        return FINISH_REASONS.get(last.reason, "length")

    def _output_logprobs(self, tokens: Iterable[TokenDetail]) -> pb.OutputLogProbs:
        logprobs = pb.OutputLogProbs()
        count = self._counts.output
        for token in tokens:
            logprobs.token_ids.append(token.token_id)
            logprobs.token_logprobs.append(token.logprob)
            if count:
                logprobs.top_logprobs.append(_top_logprobs(token, count))
        return logprobs

    def _input_logprobs(self, tokens: Sequence[TokenDetail]) -> pb.InputLogProbs:
        """Return the logprobs of the prompt. Its first token has none."""
        logprobs = pb.InputLogProbs()
        count = self._counts.prompt
        for position, token in enumerate(tokens):
            logprobs.token_ids.append(token.token_id)
            logprobs.token_logprobs.add(value=token.logprob if position else None)
            if count:
                logprobs.top_logprobs.append(_top_logprobs(token, count))
        return logprobs


def _top_logprobs(token: TokenDetail, count: int) -> pb.TopLogProbs:
    token_ids, values = zip(*token.top_tokens[:count], strict=True) if token.top_tokens else ((), ())
    return pb.TopLogProbs(token_ids=token_ids, values=values)
