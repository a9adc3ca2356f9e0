"""Lists what an API cannot express of a workload."""

from collections.abc import Callable, Mapping

from tgis.load.errors import LoadError
from tgis.load.workload.conversations import Workload

FEATURES: Mapping[str, Callable[[Workload], object]] = {
    "soft prompts": lambda workload: workload.soft_prompt_ids,
    "adapters": lambda workload: workload.adapter_ids,
    "constraints": lambda workload: workload.constraints,
    "cut prompts": lambda workload: workload.cuts_prompts,
    "details of tokens": lambda workload: workload.has_token_details,
    "calls of several prompts": lambda workload: workload.batch != "1",
}
"""Functions that return a true value if a workload needs the feature."""
MISSING: Mapping[str, tuple[str, ...]] = {
    "fmaas": (),
    "completions": ("soft prompts", "details of tokens"),
    "chat": ("soft prompts", "details of tokens", "calls of several prompts", "cut prompts"),
    "tgi": ("soft prompts", "details of tokens", "calls of several prompts"),
    "lmi": ("soft prompts", "details of tokens", "calls of several prompts", "constraints"),
    "engine": ("soft prompts", "details of tokens", "calls of several prompts", "adapters"),
}
WITHOUT_MINIMUM = ("tgi",)
"""APIs that cannot make a text longer than the model does."""


def check_features(api: str, workload: Workload) -> None:
    """Raise LoadError if the API cannot express the workload."""
    for name in MISSING[api]:
        if FEATURES[name](workload):
            raise LoadError(f"--api {api} has no {name}")
