"""Rules of TGI's API."""

from tgis.router.errors import Code, GenerationError, NotFoundError, PayloadTooLargeError
from tgis.router.requests.api_rules import ApiRules
from tgis.sampling_parameters import ABOVE_ZERO, RANGES

TGI = ApiRules(
    "tgi",
    temperature=RANGES["temperature"]._replace(low=ABOVE_ZERO),
    default_max_new_tokens=None,
    max_new_tokens=None,
    max_stop_sequences=4,
    keeps_its_stop_bound=False,
    max_best_of=2,
    shortens_texts=False,
    begins_streams_at_once=True,
    paths={
        "Generate": "/generate",
        "GenerateStream": "/generate_stream",
        "GenerateAny": "/",
        "Invocation": "/invocations",
        "Tokenize": "/tokenize",
        "ChatTokenize": "/chat_tokenize",
    },
    statuses={
        NotFoundError: 404,
        PayloadTooLargeError: 413,
        GenerationError: 424,
        Code.INVALID_ARGUMENT: 422,
        Code.RESOURCE_EXHAUSTED: 429,
        Code.UNAVAILABLE: 503,
        Code.DEADLINE_EXCEEDED: 424,
        Code.INTERNAL: 424,
    },
)
