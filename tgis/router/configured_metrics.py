"""Makes the metrics that a router's configuration asks for, equal in all of its processes."""

from tgis.config.processes import RouterConfig
from tgis.router.api.http.openai.models import served_names
from tgis.router.metrics.metrics import MetricLimits, Metrics
from tgis.router.requests.doors import FMAAS, OPENAI


def open_metrics(config: RouterConfig) -> Metrics:
    """Return the metrics of a router. Raises StartupError."""
    assert config.max_sequence_length is not None, "the launcher says how long a sequence may be"
    room = config.max_sequence_length - 1
    usual = OPENAI.max_new_tokens if config.http_api else FMAAS.max_new_tokens
    most = min(config.max_new_tokens or usual or room, room)
    limits = MetricLimits(config.max_sequence_length, most, config.max_batch_size)
    if not config.metrics_alias:
        return Metrics(limits)
    return Metrics(limits, served_names(config.served_model_name, config.tokenizer_path)[0])
