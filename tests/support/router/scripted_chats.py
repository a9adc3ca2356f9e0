"""OpenAI's API in front of a shard that answers every chat with a given text, with the template and marks of
a kind of model."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openai
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from tests.support.router.fake_shard import BLOCK_SIZE, EOS, VOCAB_SIZE
from tests.support.router.served_http import LIMITS_OF_HTTP, ServedHttp, open_http
from tests.support.tokenizers.trained import write_byte_level
from tgis.pb import shard_pb2
from tgis.router.chat.formats.registry import ChatFormats
from tgis.router.chat.renderer import ChatRenderer
from tgis.router.chat.template import ChatTemplate

MAX_LENGTH = 2000
# Short, because the shard's model reads the whole prefix for each token.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ opening }}{% endif %}"
)


def tool(name: str, strict: bool | None = None, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": f"Does {name}.", "parameters": parameters}
    return {"type": "function", "function": function | ({} if strict is None else {"strict": strict})}


WEATHER = tool("weather", city={"type": "string"})
CLOCK = tool("clock", zone={"enum": ["UTC", "CET"]})


@dataclass
class ScriptedChats:
    served: ServedHttp
    client: openai.AsyncOpenAI
    tokenizer: LLTokenizer
    """Same tokenizer, as loaded by llguidance."""

    def script(self, text: str, ends: bool = True) -> list[int]:
        """Answer with this text from now on, and return its tokens, with the end token if `ends`."""
        ids = self.served.tokenizer.fast.encode(text, add_special_tokens=False).ids
        ids += [EOS] if ends else []
        self.served.scene.shard.model.script = ids
        return ids

    def takes(self, text: str) -> bool:
        """Return True if the newest grammar that the engine received accepts the whole text."""
        grammar = self.served.handle.specs[-1].grammar
        assert grammar is not None
        matcher = LLMatcher(self.tokenizer, grammar.text, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = self.served.tokenizer.fast.encode(text, add_special_tokens=False).ids
        return (
            matcher.validate_tokens(ids) == len(ids)
            and matcher.consume_tokens(ids)
            and matcher.is_accepting()
        )

    def prompt(self) -> str:
        """Return the last prompt that the engine received."""
        spec = self.served.handle.specs[-1]
        text: str = self.served.tokenizer.fast.decode(list(spec.input_ids), skip_special_tokens=False)
        return text


@asynccontextmanager
async def scripted_chats(
    directory: Path,
    formats: ChatFormats,
    template: str = TEMPLATE,
    marks: Iterable[str] = (),
    are_special: bool = False,
) -> AsyncIterator[ScriptedChats]:
    """Open the API. `marks` are tokens of the tokenizer; `opening` is a variable of the chats' templates."""
    variables = frozenset(name for name in ("tools", "reasoning_effort") if name in template)
    added = [AddedToken(mark, special=are_special, normalized=False) for mark in marks]

    def write(directory: Path, vocab_size: int) -> Tokenizer:
        tokenizer = write_byte_level(directory, vocab_size - len(added))
        tokenizer.add_tokens(added)
        tokenizer.save(str(directory / "tokenizer.json"))
        assert tokenizer.get_vocab_size() <= VOCAB_SIZE
        return tokenizer

    limits = replace(LIMITS_OF_HTTP, max_sequence_length=MAX_LENGTH, max_guided_bytes=MAX_LENGTH)
    info = shard_pb2.InfoResponse(num_blocks=2 * MAX_LENGTH // BLOCK_SIZE)
    renderer = ChatRenderer(ChatTemplate(template, variables=variables))
    try:
        async with open_http(directory, renderer, info, limits, write, formats=formats) as served:
            async with openai.AsyncOpenAI(
                base_url=f"{served.url}/v1", api_key="none", max_retries=0
            ) as client:
                yield ScriptedChats(served, client, LLTokenizer(str(directory / "tokenizer.json")))
    finally:
        renderer.close()
