"""Reads from the configuration what calls may do: limits, rules of tenants, names of models and adapters."""

import logging
import os
from collections.abc import Callable

from tgis.config.processes import RouterConfig
from tgis.router.api.bearer_tokens import BearerTokens
from tgis.router.api.models import Models, served_names
from tgis.router.api.registry import model_placeholders, served_interfaces
from tgis.router.api.tenants import TenantRules
from tgis.router.engine.handle import EngineHandle
from tgis.router.requests.validation import RequestLimits

logger = logging.getLogger(__name__)


def request_limits(config: RouterConfig) -> RequestLimits:
    assert config.max_sequence_length is not None, "the launcher says how long a sequence may be"
    max_new_tokens = config.max_new_tokens
    room = config.max_sequence_length - 1
    if max_new_tokens is not None and room < max_new_tokens:
        logger.warning("max_new_tokens is reduced to %d, the maximum sequence length minus one", room)
    return RequestLimits(
        max_sequence_length=config.max_sequence_length,
        max_new_tokens=max_new_tokens if max_new_tokens is None else min(max_new_tokens, room),
        max_top_n_tokens=config.max_top_n_tokens,
        max_guided_bytes=config.max_guided_bytes,
        include_stop_sequence=config.default_include_stop_seqs,
        watermark_gamma=config.watermark_gamma,
        watermark_delta=config.watermark_delta,
        max_input_tokens=config.max_input_tokens,
        max_best_of=config.max_best_of,
        max_stop_sequences=config.max_stop_sequences,
        max_client_batch_size=config.max_client_batch_size,
        allows_guided=not config.disable_grammar_support,
    )


def tenant_rules(config: RouterConfig, tokens: BearerTokens | None) -> Callable[[str], TenantRules]:
    """Return a function that returns a tenant's rules."""
    default = TenantRules(
        config.priority_floor,
        config.tenant_requests_per_minute,
        config.tenant_tokens_per_minute,
        config.tenant_concurrent_requests,
    )
    if tokens is None:
        return lambda tenant: default
    return lambda tenant: tokens.rules_of(tenant, default)


def served_models(config: RouterConfig, engine: EngineHandle) -> Models:
    """Return the models that requests can name. Raises StartupError."""
    return Models(
        _served_names(config),
        adapter_ids=lambda: engine.info().preloaded_adapter_ids,
        placeholders=model_placeholders(config),
        given=engine if config.runtime_adapters else None,
    )


def adapter_roots(config: RouterConfig) -> tuple[str, ...] | None:
    """Return the directories searched for adapters, or None if clients may not name adapters."""
    roots = (config.adapter_roots or "").split(os.pathsep)
    return tuple(filter(None, roots)) if config.runtime_adapters else None


def _served_names(config: RouterConfig) -> tuple[str, ...]:
    """Return the names under which the APIs serve the model. Raises StartupError."""
    if not any(interface.names_models for interface in served_interfaces(config)):
        return ("model",)
    return served_names(config.served_model_name, config.tokenizer_path)
