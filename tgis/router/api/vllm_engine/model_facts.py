"""Reads the facts about the model that GetModelInfo returns."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tgis.config.processes import RouterConfig
from tgis.hub.model_files import read_json
from tgis.router.api.http.service_parts import ServiceParts


def find_model(config: RouterConfig) -> Path:
    """Return the directory of the model, or the tokenizer's if the router knows no other."""
    path = config.model_sampling_path
    return Path(config.tokenizer_path) if path is None else Path(path).parent


def read_model_info(parts: ServiceParts, default_sampling: Mapping[str, float]) -> pb.GetModelInfoResponse:
    """Return the facts about the model, with the sampling of requests that set none. Raises
    ModelNotFoundError."""
    info = parts.service.engine_info
    config = parts.config
    facts = read_json(find_model(config), "config.json")
    names = facts.get("architectures")
    eos = sorted(info.eos_token_ids | parts.tokenizer.eos_token_ids)
    length = parts.limits.max_sequence_length
    return pb.GetModelInfoResponse(
        model_path=str(parts.models.names[0]),
        is_generation=True,
        max_context_length=length,
        vocab_size=info.vocab_size,
        served_model_name=parts.models.names[0],
        tokenizer_path=parts.models.names[0],
        model_type=str(facts.get("model_type", "")),
        architectures=[str(name) for name in names] if isinstance(names, list) else [],
        eos_token_ids=eos,
        pad_token_id=_token_id(facts, "pad_token_id"),
        bos_token_id=_token_id(facts, "bos_token_id"),
        default_sampling_params_json=json.dumps(default_sampling) if default_sampling else "",
        max_req_input_len=min(length - 1, parts.limits.max_input_tokens or length),
    )


def _token_id(facts: Mapping[str, Any], name: str) -> int:
    value = facts.get(name)
    return value if isinstance(value, int) else 0
