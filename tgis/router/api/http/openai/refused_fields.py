"""Known fields that are not honoured: they are refused by name unless their value means nothing."""

from tgis.router.api.http.openai.errors import ApiError
from tgis.router.api.http.openai.sampling_fields import SamplingFields

MEANINGLESS: tuple[object, ...] = (None, False, 0, "", [], {})
NAMES = (
    "allowed_token_ids",
    "bad_words",
    "early_stopping",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "kv_transfer_params",
    "logits_processors",
    "priority",
    "prompt_embeds",
    "structural_tag",
    "suffix",
    "use_beam_search",
    "vllm_xargs",
)
DEFAULTS = {"length_penalty": 1, "skip_special_tokens": True, "spaces_between_special_tokens": True}


def refuse_fields(fields: SamplingFields) -> None:
    """Raise ApiError for a field that is not honoured."""
    for name in NAMES:
        if getattr(fields, name, None) not in MEANINGLESS:
            raise ApiError(400, f"{name} is not supported", name)
    for name, default in DEFAULTS.items():
        if getattr(fields, name) not in (None, default):
            raise ApiError(400, f"{name} is not supported", name)
