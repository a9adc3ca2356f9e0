"""Encodes the log-probabilities of answers slice by slice."""

from collections.abc import Iterable, Sequence

import msgspec

from tgis.router.api.http.answers.sliced_encoder import SlicedEncoder
from tgis.router.api.http.json_bodies import encode_json
from tgis.router.api.openai.answers.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    CompletionLogprobsWriter,
    PromptLogprobs,
    TokenNames,
    chat_logprobs,
    prompt_logprobs,
)
from tgis.router.sequence import TokenDetail

EncodedFields = tuple[bytes, ...]
Slice = Sequence[TokenDetail]


class LogprobsEncoder(SlicedEncoder):
    """Encoder of one answer's log-probabilities."""

    async def prompt(self, tokens: Slice, names: TokenNames, num_top: int) -> PromptLogprobs:
        def encode(part: Slice, is_first: bool) -> bytes:
            return encode_json(prompt_logprobs(part, names, num_top, is_first))

        logprobs: PromptLogprobs = self.mark(await self.slices(tokens, encode))
        return logprobs

    async def chat(self, tokens: Slice, names: TokenNames, num_top: int) -> ChatLogprobs:
        def encode(part: Slice, _: bool) -> bytes:
            return encode_json(chat_logprobs(part, names, num_top).content)

        return ChatLogprobs(self.mark(await self.slices(tokens, encode)))

    async def completion(
        self, tokens: Slice, writer: CompletionLogprobsWriter, are_first: bool = False
    ) -> list[EncodedFields]:
        """Return a writer's next tokens, encoded for `join`. With `are_first`, the first token has no
        log-probability."""
        return await self.slices(
            tokens, lambda part, is_first: _encode_fields(writer.write(part, are_first and is_first))
        )

    def join(self, parts: Iterable[EncodedFields]) -> CompletionLogprobs:
        return CompletionLogprobs(*map(self.mark, zip(*parts, strict=True)))


def _encode_fields(logprobs: CompletionLogprobs) -> EncodedFields:
    return tuple(map(encode_json, msgspec.structs.astuple(logprobs)))
