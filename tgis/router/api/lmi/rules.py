"""Rules of LMI's API."""

from tgis.router.errors import Code, GenerationError, PayloadTooLargeError
from tgis.router.requests.api_rules import ApiRules
from tgis.router.requests.http_statuses import is_late
from tgis.sampling_parameters import RANGES

LMI = ApiRules(
    "lmi",
    temperature=RANGES["temperature"]._replace(low=0),
    default_max_new_tokens=30,
    max_new_tokens=None,
    max_top_n_tokens=20,
    max_stop_sequences=16,
    paths={"Invocation": "/invocations", "Prediction": "/predictions/{model}"},
    statuses={
        PayloadTooLargeError: 413,
        GenerationError: 424,
        is_late: 424,
        Code.INVALID_ARGUMENT: 424,
        Code.RESOURCE_EXHAUSTED: 503,
        Code.UNAVAILABLE: 503,
        Code.DEADLINE_EXCEEDED: 400,
        Code.INTERNAL: 424,
    },
)
