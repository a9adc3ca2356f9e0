"""Every directory of deployment/ renders and keeps every rule."""

import pytest

from integration_tests.deployment.manifests.rendering import DIRECTORIES, objects_of
from integration_tests.deployment.manifests.rules import rules_of

pytestmark = pytest.mark.deploy


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_rules_are_kept(directory: str) -> None:
    objects = objects_of(directory)
    assert [f"{rule.__name__}: {problem}" for rule in rules_of(directory) for problem in rule(objects)] == []


def test_all_that_was_asked_for_is_there() -> None:
    overlays = (
        "cpu gpu-1 gpu-2 gpu-8 tls read-only pvc shm autoscale-hpa autoscale-keda network-policy multi-node "
        "inference-pool"
    )
    assert {f"overlays/{name}" for name in overlays.split()} <= {*DIRECTORIES}
    assert {"kserve", "kserve/http", "kserve/caikit"} <= {*DIRECTORIES}
    assert {"gateway/discovery", "gateway/mutual-tls"} <= {*DIRECTORIES}
