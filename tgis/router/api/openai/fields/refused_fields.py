"""Fields of requests that are known here and not honoured: one table, a sentence each."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from tgis.router.api.openai.errors import ApiError

MEANINGLESS: tuple[object, ...] = (None, False, "", [], {})


class RefusedField(NamedTuple):
    reason: str
    defaults: tuple[object, ...] = ()
    """Values that ask for what is done anyway."""


REFUSED = {
    "suffix": RefusedField("Text can only be added after the prompt."),
    "prompt_embeds": RefusedField("Prompts are text or token ids."),
    "functions": RefusedField("Use tools."),
    "function_call": RefusedField("Use tool_choice.", ("none",)),
    "chat_template": RefusedField("The template is the operator's choice."),
    "use_beam_search": RefusedField("Texts are sampled or decoded greedily."),
    "early_stopping": RefusedField("It belongs to beam search."),
    "length_penalty": RefusedField("It belongs to beam search.", (1, 1.0)),
    "logits_processors": RefusedField("A request cannot bring code."),
    "bad_words": RefusedField("Use logit_bias for single tokens."),
    "allowed_token_ids": RefusedField("Use structured_outputs or logit_bias."),
    "guided_decoding_backend": RefusedField("There is one back end."),
    "guided_whitespace_pattern": RefusedField("White space follows the grammar."),
    "structural_tag": RefusedField("Structural tags are not supported."),
    "mm_processor_kwargs": RefusedField("Only text is served."),
    "modalities": RefusedField("Only text is served.", (["text"],)),
    "audio": RefusedField("Only text is served."),
    "prediction": RefusedField("Predicted outputs are not supported."),
    "web_search_options": RefusedField("Nothing is fetched."),
    "kv_transfer_params": RefusedField("Caches are not moved between servers."),
    "vllm_xargs": RefusedField("They are another server's."),
    "priority": RefusedField("All requests are equal.", (0,)),
    "store": RefusedField("Answers are not stored."),
    "verbosity": RefusedField("The model decides.", ("medium",)),
    "skip_special_tokens": RefusedField("The operator decides if special tokens are shown.", (True,)),
    "spaces_between_special_tokens": RefusedField("Tokens are decoded as they are.", (True,)),
}
IN_CHATS = {
    "best_of": RefusedField("Chats have n only.", (1,)),
    "echo": RefusedField("A prompt that a template makes is not repeated."),
}


def refuse_fields(fields: msgspec.Struct, further: dict[str, RefusedField] | None = None) -> None:
    """Raise ApiError for a field of the request that is not honoured and asks for something."""
    for name, text in find_refused(fields, REFUSED | (further or {})):
        raise ApiError(400, text, name)


def find_refused(fields: msgspec.Struct, table: Mapping[str, RefusedField]) -> Iterator[tuple[str, str]]:
    """Yield the fields of a table that ask for something, each with the text of its refusal."""
    for name, refused in table.items():
        value: Any = getattr(fields, name, None)
        is_on = any(each is True for each in refused.defaults)  # False asks for something then
        allowed = refused.defaults if is_on else MEANINGLESS + refused.defaults
        if value is not None and not _is_among(value, allowed):
            yield name, f"{name} is not supported. {refused.reason}"


def _is_among(value: object, allowed: tuple[object, ...]) -> bool:
    """Return True for an allowed value. True is not 1 and False is not 0 here."""
    return any(value == one and (isinstance(value, bool) == isinstance(one, bool)) for one in allowed)
