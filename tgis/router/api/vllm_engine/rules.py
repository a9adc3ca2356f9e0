"""Rules of the engine API. They are those of OpenAI's API, which gateways in front of it serve."""

from tgis.router.requests.api_rules import ApiRules
from tgis.sampling_parameters import FINITE, Range

VLLM_ENGINE = ApiRules(
    "vllm-engine",
    temperature=Range(0, FINITE, refusal="temperature must be >= 0.0"),
    default_max_new_tokens=None,
    max_new_tokens=None,
    max_top_n_tokens=20,
    max_stop_sequences=16,
    returns_texts=False,
    rpc_service="vllm.grpc.engine.VllmEngine",
)
