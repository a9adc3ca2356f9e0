"""The `text-generation` package, TGI's own client, with the service's address as its base URL."""

import asyncio
import json
import re

import text_generation
from text_generation.errors import ValidationError
from text_generation.types import Grammar, GrammarType, Message, Response, StreamResponse

from integration_tests.clients.expectations import TGI_REASONS, Check, Completion, Served, is_close, run

SCHEMA = {
    "type": "object",
    "properties": {"animal": {"enum": ["fox", "dog"]}, "is_quick": {"type": "boolean"}},
    "required": ["animal", "is_quick"],
    "additionalProperties": False,
}
PATTERN = "[a-z]{4,9}( [a-z]{2,5}){2}"


def connect(served: Served) -> text_generation.Client:
    return text_generation.Client(served.root, headers=served.headers, timeout=60)


def check_answer(answer: Response, asked: Completion) -> None:
    assert answer.generated_text == asked.text
    details = answer.details
    assert details.finish_reason == TGI_REASONS[asked.finish_reason]
    assert details.generated_tokens == len(asked.output_ids)
    assert [token.id for token in details.tokens] == asked.output_ids
    assert "".join(token.text for token in details.tokens if not token.special) == asked.text
    assert is_close([token.logprob for token in details.tokens], asked.logprobs)
    assert details.seed is None


def a_prompt_is_completed(served: Served) -> None:
    for asked in served.completions[:6]:
        answer = connect(served).generate(asked.prompt, max_new_tokens=asked.max_tokens)
        check_answer(answer, asked)
        assert answer.details.prefill == []


def prompt_tokens_are_returned(served: Served) -> None:
    for asked in served.completions[:3]:
        answer = connect(served).generate(
            asked.prompt, max_new_tokens=asked.max_tokens, decoder_input_details=True
        )
        first, *others = answer.details.prefill
        assert [first.id, *(token.id for token in others)] == asked.ids
        assert first.logprob is None
        assert is_close([token.logprob for token in others], asked.prompt_logprobs)
        check_answer(answer, asked)


def check_stream(parts: list[StreamResponse], asked: Completion) -> None:
    assert [part.token.id for part in parts] == asked.output_ids
    assert "".join(part.token.text for part in parts if not part.token.special) == asked.text
    assert is_close([part.token.logprob for part in parts], asked.logprobs)
    assert [part.generated_text for part in parts] == [None] * (len(parts) - 1) + [asked.text]
    assert all(part.details is None for part in parts[:-1])
    details = parts[-1].details
    assert details is not None
    assert details.generated_tokens == len(asked.output_ids)
    assert details.finish_reason == TGI_REASONS[asked.finish_reason]


def a_prompt_streams(served: Served) -> None:
    for asked in served.completions[:6]:
        check_stream(
            list(connect(served).generate_stream(asked.prompt, max_new_tokens=asked.max_tokens)), asked
        )


def prompts_are_completed_async(served: Served) -> None:
    async def ask() -> None:
        client = text_generation.AsyncClient(served.root, headers=served.headers, timeout=60)
        some = served.completions[:6]
        calls = [client.generate(asked.prompt, max_new_tokens=asked.max_tokens) for asked in some]
        for asked, answer in zip(some, await asyncio.gather(*calls), strict=True):
            check_answer(answer, asked)
        for asked in some[:3]:
            parts = client.generate_stream(asked.prompt, max_new_tokens=asked.max_tokens)
            check_stream([part async for part in parts], asked)

    asyncio.run(ask())


def a_seed_gives_the_same_answer(served: Served) -> None:
    settings = {"do_sample": True, "temperature": 0.9, "top_k": 40, "top_p": 0.9, "typical_p": 0.9}
    client = connect(served)
    answers = [
        client.generate("the quick", max_new_tokens=12, seed=seed, **settings) for seed in (7, 7, 8, 9)
    ]
    texts = [answer.generated_text for answer in answers]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1
    assert [answer.details.seed for answer in answers] == [7, 7, 8, 9]
    parts = client.generate_stream("the quick", max_new_tokens=12, seed=7, **settings)
    assert [part.generated_text for part in parts][-1] == texts[0]


def the_best_of_several_is_given(served: Served) -> None:
    answer = connect(served).generate("a little", do_sample=True, best_of=2, max_new_tokens=8)
    details = answer.details
    [other] = details.best_of_sequences or []
    means = [sum(token.logprob for token in each.tokens) / len(each.tokens) for each in (details, other)]
    assert means[0] >= means[1]


def top_tokens_are_given(served: Served) -> None:
    asked = served.completions[0]
    answer = connect(served).generate(asked.prompt, max_new_tokens=5, top_n_tokens=3)
    assert answer.details.top_tokens is not None
    for best, token in zip(answer.details.top_tokens, answer.details.tokens, strict=True):
        assert len(best) == 3
        assert best[0].id == token.id
        assert best[0].logprob >= best[1].logprob >= best[2].logprob


def texts_have_a_grammar(served: Served) -> None:
    client, prompt = connect(served), served.completions[0].prompt
    grammar = Grammar(type=GrammarType.Json, value=SCHEMA)
    answer = client.generate(prompt, max_new_tokens=200, grammar=grammar)
    assert set(json.loads(answer.generated_text)) == {"animal", "is_quick"}
    grammar = Grammar(type=GrammarType.Regex, value=PATTERN)
    answer = client.generate(prompt, max_new_tokens=100, grammar=grammar)
    assert re.fullmatch(PATTERN, answer.generated_text)


def prompts_are_cut_and_returned(served: Served) -> None:
    client, asked = connect(served), served.completions[0]
    cut = client.generate(asked.prompt, max_new_tokens=4, truncate=3, decoder_input_details=True)
    assert len(cut.details.prefill) == 3
    assert cut.details.prefill[-1].id == asked.ids[-1]
    whole = client.generate(asked.prompt, max_new_tokens=asked.max_tokens, return_full_text=True)
    assert whole.generated_text == asked.prompt + asked.text


def a_chat_is_completed(served: Served) -> None:
    """The client calls every model `tgi`, and sends unset parameters as null."""
    for chat in served.chats[:3]:
        messages = [Message(**message) for message in chat.messages]
        answer = connect(served).chat(messages, max_tokens=chat.answer.max_tokens, temperature=0)
        [choice] = answer.choices
        assert choice.message.content == chat.answer.text
        assert choice.finish_reason == chat.answer.finish_reason


def errors_have_their_type(served: Served) -> None:
    text = ""
    try:
        connect(served).generate("a", max_new_tokens=served.max_sequence_length + 1)
    except ValidationError as error:
        text = str(error)
    assert text.startswith("Input validation error: `inputs` tokens + `max_new_tokens` must be <= "), text


CHECKS: list[Check] = [
    a_prompt_is_completed,
    prompt_tokens_are_returned,
    a_prompt_streams,
    prompts_are_completed_async,
    a_seed_gives_the_same_answer,
    the_best_of_several_is_given,
    top_tokens_are_given,
    texts_have_a_grammar,
    prompts_are_cut_and_returned,
    a_chat_is_completed,
    errors_have_their_type,
]

if __name__ == "__main__":
    run(CHECKS)
