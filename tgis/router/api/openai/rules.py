"""Rules of OpenAI's API."""

from tgis.router.errors import Code, NotFoundError, PayloadTooLargeError
from tgis.router.requests.api_rules import ApiRules
from tgis.sampling_parameters import Range

OPENAI = ApiRules(
    "openai",
    temperature=Range(0, 2, refusal="temperature must be >= 0.0 and <= 2.0"),
    default_max_new_tokens=None,
    max_new_tokens=None,
    max_top_n_tokens=20,
    max_stop_sequences=16,
    paths={
        "Completion": "/v1/completions",
        "ChatCompletion": "/v1/chat/completions",
        "Tokenize": "/tokenize",
        "Detokenize": "/detokenize",
    },
    statuses={
        NotFoundError: 404,
        PayloadTooLargeError: 413,
        Code.INVALID_ARGUMENT: 400,
        Code.RESOURCE_EXHAUSTED: 429,
        Code.UNAVAILABLE: 503,
        Code.DEADLINE_EXCEEDED: 504,
        Code.INTERNAL: 500,
    },
    chat_methods=frozenset(("ChatCompletion",)),
)
