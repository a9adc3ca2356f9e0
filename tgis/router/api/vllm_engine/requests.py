"""Reads Generate requests. A number that is 0 is not set, except for temperature and seed."""

from functools import partial
from typing import NamedTuple

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tgis.router.api.grpc.call_status import Context
from tgis.router.api.grpc.described_fields import describe_fields
from tgis.router.api.grpc.priority_metadata import ALLOWED_PRIORITY, PRIORITY, PRIORITY_KEY
from tgis.router.api.renamed_parameters import renamed_log_text
from tgis.router.api.tenants import tenant_of
from tgis.router.api.vllm_engine.rules import VLLM_ENGINE
from tgis.router.grammar.compiler import JSON, Guided
from tgis.router.requests.call import GenerationCall, Metadata, write_ids
from tgis.router.requests.parameters import Parameters, read_seed, same_named

NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_sequences": "stop",
    "top_n_tokens": "logprobs",
    "truncate_input_tokens": "truncate_prompt_tokens",
    "format": "json_object",
}
"""This API's names of parameters by the service's names, where they differ."""
BAD_PRIORITY = f"{PRIORITY_KEY} must be {ALLOWED_PRIORITY}"


class LogprobCounts(NamedTuple):
    """Requested numbers of likeliest tokens at each position. None: the position's logprob is not requested
    either."""

    output: int | None
    prompt: int | None


def read_logprob_counts(sampling: pb.SamplingParams) -> LogprobCounts:
    return LogprobCounts(
        sampling.logprobs if sampling.HasField("logprobs") else None,
        sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
    )


def read_call(request: pb.GenerateRequest, context: Context) -> GenerationCall:
    are_ids = request.WhichOneof("input") == "tokenized"
    text = write_ids(request.tokenized.input_ids) if are_ids else request.text
    metadata = context.invocation_metadata() or ()
    priority = _read_priority(metadata)
    return GenerationCall(
        "Generate",
        "stream" if request.stream else "single",
        [text],
        _read_parameters(request.sampling_params, priority or 0),
        lambda: ", ".join(describe_fields(request.sampling_params)),
        metadata,
        context.peer(),
        refusal=_find_refusal(request) if priority is not None else BAD_PRIORITY,
        inputs_are_ids=are_ids,
        client_id=request.request_id,
        tenant=tenant_of(context),
        api=VLLM_ENGINE,
        describe_refusal=partial(renamed_log_text, names=NAMES),
        time_left_s=context.time_remaining(),
    )


def _read_priority(metadata: Metadata) -> int | None:
    """Return the priority in a call's metadata, or None if it is invalid."""
    given = [value for key, value in metadata if key == PRIORITY_KEY]
    if not given:
        return 0
    is_valid = len(given) == 1 and isinstance(given[0], str) and PRIORITY.fullmatch(given[0])
    return int(given[0]) if is_valid else None


def _find_refusal(request: pb.GenerateRequest) -> str:
    """Return the reason why a request cannot be served, or an empty text."""
    sampling = request.sampling_params
    if request.WhichOneof("input") is None:
        return "input: a request needs token ids or a text"
    if request.HasField("mm_inputs") or request.extra_mm_inputs or request.HasField("media_refs"):
        return "mm_inputs: only text is served"
    if request.HasField("kv_transfer_params") or request.HasField("kv_transfer_params_json"):
        return "kv_transfer_params: caches are not moved between servers"
    if request.data_parallel_rank:
        return "data_parallel_rank must be 0, because there is one engine"
    if sampling.HasField("structural_tag"):
        return "structural_tag: structural tags are not supported"
    # -1 means the length of the model, beyond which an input is refused.
    for name, minimum in (("logprobs", 0), ("prompt_logprobs", 0), ("truncate_prompt_tokens", -1)):
        if getattr(sampling, name) < minimum:
            return f"{name} must be >= {minimum}"
    return ""


def _read_parameters(sampling: pb.SamplingParams, priority: int) -> Parameters:
    counts = read_logprob_counts(sampling)
    set_fields = {
        "sample": True,
        "temperature": sampling.temperature if sampling.HasField("temperature") else None,
        "seed": read_seed(sampling.seed if sampling.HasField("seed") else None),
        "n": sampling.n or 1,
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": sampling.min_tokens,
        "stop_sequences": tuple(sampling.stop),
        "stop_token_ids": tuple(sampling.stop_token_ids),
        "include_stop_sequence": sampling.include_stop_str_in_output,
        "logit_bias": tuple(sampling.logit_bias.items()),
        "truncate_input_tokens": max(sampling.truncate_prompt_tokens, 0),
        "guided": _read_guided(sampling),
        "generated_tokens": counts.output is not None,
        "input_tokens": counts.prompt is not None,
        "token_logprobs": counts != (None, None),
        "top_n_tokens": max(counts.output or 0, counts.prompt or 0),
        "priority": priority,
        "raw_details": True,
    }
    return Parameters(**same_named(sampling) | set_fields)


def _read_guided(sampling: pb.SamplingParams) -> Guided | None:
    match sampling.WhichOneof("constraint"):
        case None:
            return None
        case "json_object":
            return Guided("format", JSON) if sampling.json_object else None
        case "choice":
            return Guided("choice", choices=tuple(sampling.choice.choices))
        case field:
            return Guided(field, getattr(sampling, field))
