"""Lists the fields of requests that this API knows but does not support, with the reasons."""

import msgspec

from tgis.router.api.http.fields.refused_fields import RefusedField, find_refused
from tgis.router.api.openai.errors import ApiError

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
    """Raise ApiError for a field of the request that asks for something unsupported."""
    for name, text in find_refused(fields, REFUSED | (further or {})):
        raise ApiError(400, text, name)
