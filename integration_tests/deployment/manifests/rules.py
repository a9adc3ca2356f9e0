"""Lists all our rules for rendered objects; each yields its findings, one per line."""

from collections.abc import Callable, Iterator

from integration_tests.deployment.manifests import (
    gateway_rules,
    launch_rules,
    pod_rules,
    selection_rules,
)
from integration_tests.deployment.manifests.rendering import PRODUCTION, Object

Rule = Callable[[list[Object]], Iterator[str]]

EVERYWHERE: tuple[Rule, ...] = (
    launch_rules.commands_exist,
    launch_rules.variables_exist,
    launch_rules.options_are_read,
    launch_rules.drains_fit,
    launch_rules.probes_meet_ports,
    launch_rules.ports_are_served,
    launch_rules.devices_are_counted,
    pod_rules.has_no_rights,
    pod_rules.resources_are_set,
    pod_rules.volumes_exist,
    pod_rules.accounts_exist,
    pod_rules.files_are_mounted,
    pod_rules.can_write_where_it_must,
    pod_rules.shards_share_memory,
    selection_rules.selectors_find_pods,
    selection_rules.spread_is_of_its_own,
    selection_rules.services_lead_to_ports,
    selection_rules.monitors_lead_to_ports,
    selection_rules.policies_fit_ports,
    selection_rules.traces_may_leave,
    selection_rules.autoscalers_scale_on_demand,
    selection_rules.groups_recover,
    selection_rules.names_are_certified,
    selection_rules.issuers_exist,
    gateway_rules.tokens_have_few_rights,
    gateway_rules.pools_lead_to_servers,
    gateway_rules.routes_lead_to_pools,
    gateway_rules.gateways_find_replicas,
)
FOR_PRODUCTION: tuple[Rule, ...] = (launch_rules.images_are_fixed,)
WITHOUT_WRITING: tuple[Rule, ...] = (pod_rules.writes_nowhere_else,)
ALL = EVERYWHERE + FOR_PRODUCTION + WITHOUT_WRITING


def rules_of(directory: str) -> tuple[Rule, ...]:
    is_read_only = directory.startswith(("models/", "kserve", "gateway/")) or directory in (
        PRODUCTION,
        "overlays/read-only",
        "overlays/multi-node",
    )
    return (
        EVERYWHERE
        + (FOR_PRODUCTION if directory == PRODUCTION else ())
        + (WITHOUT_WRITING if is_read_only else ())
    )
