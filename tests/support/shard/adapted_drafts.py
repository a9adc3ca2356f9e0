"""An adapter and a soft prompt for the model of `speculator_scene`, whose requests speculators must answer
alike."""

from pathlib import Path

import torch

from tests.support.shard.drafting import DraftingRouter
from tests.support.shard.driver import Router
from tests.support.shard.relay import Copies
from tests.support.shard.speculator_scene import Base, make_requests
from tests.support.shard.tuned import Tuned
from tgis.prompts.lora_files import read_adapter_files
from tgis.shard.runner.interface import ModelRunner

NUM_VIRTUAL = 4  # virtual tokens of the soft prompt


def write_lora(base: Base, directory: Path, seed: int = 1) -> Copies:
    """Write an adapter of all linear layers."""
    Tuned(base.directory, directory / "adapter", seed, r=4, target_modules="all-linear")
    tensors, scales = read_adapter_files(directory / "adapter", 1 << 20)
    return Copies(str(directory / "shard")).put("adapter", tensors, {"scales": scales})


def write_adapters(base: Base, directory: Path, seed: int = 1) -> tuple[Copies, dict[str, str]]:
    """Write an adapter and a soft prompt. Return them and the options of shards that load them."""
    copies = write_lora(base, directory, seed)
    virtual = torch.randn(NUM_VIRTUAL, 64, generator=torch.Generator().manual_seed(seed))
    copies = copies.put("prompt", {"decoder": virtual}, {})
    store = str(directory)
    return copies, {"uds_path": copies.uds_path, "adapter_cache": store, "prefix_store_path": store}


def check_adapted_outputs(without: ModelRunner, runner: ModelRunner, copies: Copies, seed: int = 1) -> None:
    """Check that drafts of a runner's speculator do not change the tokens of requests with an adapter, a soft
    prompt, or both. The runner `without` drafts may be the same."""
    for each in {without, runner}:
        for digest in copies.digests:
            each.adapters.load(digest)
    lora, prompt = copies.digests
    plain, drafted = make_requests(), make_requests()
    for requests in (plain, drafted):
        for i, request in enumerate(requests):
            request.adapter_digest = lora if i % 2 else ""
            if i % 3 == 0:
                request.prompt, request.prompt_digest = [0] * NUM_VIRTUAL + request.prompt, prompt
    Router(without, seed).run([*plain])
    runner.reset()
    router = DraftingRouter(runner, 1.0, seed, left_to_shard=1.0)
    router.run([*drafted])
    assert [r.generated for r in drafted] == [r.generated for r in plain]
    assert router.num_proposed > 50
