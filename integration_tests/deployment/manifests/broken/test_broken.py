"""Every rule reports its errors, and nothing else."""

import pytest

from integration_tests.deployment.manifests.broken import gateways, launches, pods, selections
from integration_tests.deployment.manifests.broken.case import Broken, change, right
from integration_tests.deployment.manifests.rules import ALL

pytestmark = pytest.mark.deploy

BROKEN = [*launches.CASES, *pods.CASES, *selections.CASES, *gateways.CASES]


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_it_is_refused(case: Broken) -> None:
    objects = right(case)
    assert list(case.rule(objects)) == []
    change(objects, case.kind, case.path, case.value)
    problems = list(case.rule(objects))
    assert any(case.says in problem for problem in problems), problems


def test_every_rule_was_seen_to_refuse() -> None:
    assert {case.rule for case in BROKEN} == {*ALL}
