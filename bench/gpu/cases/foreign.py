"""Compares tiny models that transformers' code runs with this service's attention with transformers alone."""

from bench.gpu.cases.families import SIZES, make_requests
from bench.gpu.cases.models import load_model, record_comparison, run_on, temporary_directory
from bench.gpu.target import Target
from tests.support.shard.checkpoints import write_model
from tests.support.shard.driver import Router, configure
from tests.support.shard.family_oracle import Oracle, check, draw_inputs
from tests.support.shard.foreign_cases import CASES
from tgis.pb import shard_pb2 as pb

EAGER = {pb.STEP_PATH_UNSPECIFIED, pb.STEP_PATH_MODEL, pb.STEP_PATH_PROMPT}


def check_model(target: Target, name: str) -> None:
    config = CASES[name]()
    with temporary_directory() as directory:
        write_model(directory, config)
        oracle = Oracle(directory, config)
        answers = [oracle.answer(ids) for ids in draw_inputs()]
        sizes = {**SIZES, "max_sequence_length": 64, "deployment_framework": "hf_transformers"}
        runner = load_model(target, configure(directory, **sizes))
        detailed = make_requests(oracle, answers, {"logprobs": True, "ranks": True})
        runner.reset()
        router = Router(runner, seed=1)
        router.run(list(detailed))

    def compare() -> None:
        for request, answer in zip(detailed, answers, strict=True):
            check(request, answer)

    record_comparison(target, f"{name} through transformers: as transformers", compare)
    paths = {response.path for response in router.responses}
    target.recorder.check(f"{name} through transformers: the GPU samples", paths <= EAGER)
    requests = make_requests(oracle, answers, {})
    ahead, alone = (run_on(runner, requests, depth) for depth in (2, 1))
    target.recorder.check(f"{name} through transformers: ahead and one by one are equal", ahead == alone)
