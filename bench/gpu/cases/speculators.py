"""Checks drafts of speculators on the device: outputs must be those without a speculator."""

import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from bench.gpu.cases.models import load_model, temporary_directory
from bench.gpu.target import Target
from tests.support.shard.draft_heads import States
from tests.support.shard.drafting import DraftingRouter
from tests.support.shard.driver import configure
from tests.support.shard.eagle3_heads import make_eagle3
from tests.support.shard.portable import plain
from tests.support.shard.speculator_scene import VOCAB_SIZE, Base, make_requests, write_base
from tests.support.shard.speculators import make_medusa, make_mlp
from tgis.pb import shard_pb2 as pb


def write_eagle3(base: Base, directory: Path) -> Path:
    texts = [text.token_ids for text in base.texts]
    heads, _ = make_eagle3(States.load(base.directory), texts, [1, 2, 3])
    return heads.write(directory)


def copy_model(base: Base, directory: Path) -> Path:
    return Path(shutil.copytree(base.directory, directory))


WRITERS: dict[str, Callable[[Base, Path], Path]] = {
    "mlp": lambda base, directory: make_mlp(base.texts, VOCAB_SIZE).write(directory),
    "medusa": lambda base, directory: make_medusa(base.texts, VOCAB_SIZE).write(directory),
    "eagle3": write_eagle3,
    "draft model": copy_model,
}


def check(target: Target, kind: str) -> None:
    """Compare the outputs of rows with drafts of a speculator, most of which are right, with those of rows
    without drafts on the CPU."""
    with temporary_directory() as directory:
        (directory / "base").mkdir()
        base = write_base(directory / "base", plain(torch.device("cpu")), num_hidden_layers=4)
        path = WRITERS[kind](base, directory / "speculator")
        config = configure(base.directory, speculator=str(path), dtype="float32", max_step_tokens=64)
        runner = load_model(target, config)
        runner.reset()
        requests = make_requests()
        router = DraftingRouter(runner, luck=1.0, seed=0, left_to_shard=1.0)
        router.run([*requests])
    are_equal = [request.generated for request in requests] == [each.generated for each in base.requests]
    target.recorder.check(f"{kind}: tokens as on the CPU without drafts", are_equal)
    detail = f"{router.num_right} of {router.num_proposed}"
    target.recorder.check(f"{kind}: drafts are right as on the CPU", router.num_right > 30, detail)
    paths = {response.path for response in router.responses}
    target.recorder.check(f"{kind}: drafts are verified in graphs", pb.STEP_PATH_GRAPH in paths)
    times = [response.follow_ns / 1e3 for response in router.responses if response.follow_ns]
    target.recorder.check(f"{kind}: the time of following is measured", bool(times))
    if times:
        target.recorder.figure(f"{kind}: following a step", median(times), "us", "median")
