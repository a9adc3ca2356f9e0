"""Opens the metrics of a router from its configuration. All processes of a router have equal metrics."""

import asyncio
from pathlib import Path

from tgis.config.processes import RouterConfig
from tgis.router.api.models import served_names
from tgis.router.api.registry import metric_aliases, served_interfaces
from tgis.router.metrics.aliased_series import MakeAliases
from tgis.router.metrics.metric_file import SUFFIX, MetricFile
from tgis.router.metrics.metrics import ENGINE, ROUTER, MetricLimits, Metrics
from tgis.router.metrics.resource_counts import count_descriptors


def open_metrics(config: RouterConfig, process: str = ROUTER) -> Metrics:
    """Return the metrics of a router's process, which is ROUTER or ENGINE. If the router keeps metrics in
    files, they continue from the values of the previous process. Raises StartupError."""
    assert config.max_sequence_length is not None, "the launcher says how long a sequence may be"
    room = config.max_sequence_length - 1
    own_limits = [interface.rules.max_new_tokens or room for interface in served_interfaces(config)]
    max_new_tokens = min(config.max_new_tokens or max(own_limits), room)
    limits = MetricLimits(config.max_sequence_length, max_new_tokens, config.max_batch_size)
    metrics = Metrics(limits, _aliases(config, limits), _open_file(config, process))
    metrics.begin_process(process)
    metrics.tasks.follow(lambda: len(asyncio.all_tasks()))
    metrics.descriptors.follow(count_descriptors)
    return metrics


def _aliases(config: RouterConfig, limits: MetricLimits) -> MakeAliases | None:
    """Return the factory of the series of `--metrics-alias`, if the flag is set. Raises StartupError."""
    if config.metrics_alias is None:
        return None
    model_name, *_ = served_names(config.served_model_name, config.tokenizer_path)
    return metric_aliases()[config.metrics_alias](model_name, limits.max_sequence_length)


def _open_file(config: RouterConfig, process: str) -> MetricFile | None:
    """Open the process's metric file, if the router keeps its metrics in files. Raises StartupError."""
    if config.metrics_dir is None:
        return None
    slot = ENGINE if process == ENGINE else f"worker-{config.worker}"
    return MetricFile(Path(config.metrics_dir) / f"{slot}{SUFFIX}")
