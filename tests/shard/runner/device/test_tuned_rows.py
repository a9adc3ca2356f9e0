"""Check rows with soft prompts and adapters beside rows without, on a late device, against peft."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cuda.late_device import LateDevice
from tests.support.cuda.late_platform import late_platform
from tests.support.shard.adapter_cases import AdapterCase
from tests.support.shard.driver import Request, Router, configure
from tests.support.shard.prompt_cases import Case
from tgis.pb import shard_pb2 as pb
from tgis.shard.startup.load import load

CASES: dict[str, Callable[[Path], Case | AdapterCase]] = {
    "prompts": lambda root: Case("granite_biases", root),
    "prompts of an encoder-decoder": lambda root: Case("bart_scaled", root),
    "adapters": lambda root: AdapterCase("llama_tied", root),
    "adapters of an encoder-decoder": lambda root: AdapterCase("t5", root),
}


def ask(case: Case | AdapterCase, wants_details: bool) -> list[Request]:
    requests = [case.request(asked) for asked in case.asked]
    for request in requests:
        request.details = request.details if wants_details else {}
    return requests


QUICK = {"adapters"}
MARKED = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize("name", MARKED)
def test_equals_peft(name: str, tmp_path: Path) -> None:
    case = CASES[name](tmp_path)
    options = {"kv_cache_tokens": 2048, "block_size": 4, "uds_path": case.copies.uds_path, "dtype": "float32"}
    runner = load(configure(case.directory, **options), on=late_platform(LateDevice()))
    runner.reset()
    for digest in case.copies.digests:
        runner.adapters.load(digest)
    bare, again, detailed = (ask(case, wants_details) for wants_details in (False, False, True))
    router = Router(runner, seed=1, depth=3)
    router.run(list(bare))
    paths = {response.path for response in router.responses}
    alone = pb.STEP_PATH_ADAPTER if isinstance(case, AdapterCase) else pb.STEP_PATH_GRAPH
    assert {pb.STEP_PATH_PROMPT, alone} <= paths
    runner.reset()
    Router(runner, seed=2).run([*again, *detailed])
    for request, asked in zip([*bare, *again, *detailed], case.asked * 3, strict=True):
        assert asked.answer.certain
        assert request.generated[: asked.answer.certain] == asked.answer.token_ids[: asked.answer.certain]
