"""`lm-eval` over HTTP compared with its own `hf` back end, same model: scores, log-likelihoods and texts."""

import os
from typing import Any

# Nothing may be downloaded: tasks, data and the model are local.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1")

import lm_eval
import torch
from lm_eval.tasks import TaskManager

from integration_tests.clients.expectations import Check, Served, run

TASKS = "integration_tests/clients/tasks"
SCORED = ["tiny_choices", "tiny_last_words", "tiny_documents"]
TOLERANCE = 1e-3  # of a log-likelihood, relative or absolute; both compute in float32

Results = dict[str, Any]


def evaluate(model: str, args: dict[str, Any], tasks: list[str], **more: Any) -> Results:
    results = lm_eval.simple_evaluate(
        model=model,
        model_args=args,
        tasks=tasks,
        task_manager=TaskManager(include_path=TASKS, include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
        **more,
    )
    assert results is not None
    return results


def own(served: Served, tasks: list[str], **more: Any) -> Results:
    args = {"pretrained": served.directory, "dtype": "float32", "max_length": served.max_sequence_length}
    return evaluate("hf", {**args, "add_bos_token": False}, tasks, device="cpu", **more)


def over_http(served: Served, model: str, path: str, tasks: list[str], **more: Any) -> Results:
    os.environ["OPENAI_API_KEY"] = served.api_key
    args = {
        "model": served.model,
        "base_url": f"{served.base_url}/{path}",
        "tokenizer": served.directory,
        "tokenizer_backend": "huggingface",
        "max_length": served.max_sequence_length,
        "max_retries": 1,
        **more.pop("args", {}),
    }
    return evaluate(model, args, tasks, **more)


def assert_equal(given: Results, wanted: Results, tasks: list[str]) -> None:
    for task in tasks:
        for name, score in wanted["results"][task].items():
            other = given["results"][task][name]
            is_same = _is_near(other, score) if isinstance(score, float) else other == score
            assert is_same, f"{task} {name}: {other} instead of {score}"
        samples = [sorted(results["samples"][task], key=_number) for results in (given, wanted)]
        assert len(samples[0]) == len(samples[1]) > 3
        for one, other in zip(*samples, strict=True):
            assert _same(one["filtered_resps"], other["filtered_resps"]), (task, one, other)


def _number(sample: dict[str, Any]) -> int:
    number: int = sample["doc_id"]
    return number


def _is_near(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE * max(1.0, abs(other))


def _same(one: Any, other: Any) -> bool:
    """Return True if two results are equal: texts, or log-likelihoods with their flag of greediness."""
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return _is_near(one, other)
    return bool(str(one) == str(other))


def log_likelihoods_are_transformers_own(served: Served) -> None:
    wanted = own(served, SCORED)
    accuracy = wanted["results"]["tiny_last_words"]["acc,none"]
    assert 0 < accuracy < 1, "some words must be the greedy ones, and some not, for a mistake to show"
    for args in ({"num_concurrent": 1}, {"num_concurrent": 4}, {"batch_size": 4}):
        given = over_http(served, "local-completions", "completions", SCORED, args=args)
        assert_equal(given, wanted, SCORED)


def texts_are_transformers_own(served: Served) -> None:
    wanted = own(served, ["tiny_questions"])
    given = over_http(served, "local-completions", "completions", ["tiny_questions"])
    assert_equal(given, wanted, ["tiny_questions"])


def chats_are_transformers_own(served: Served) -> None:
    settings = {"apply_chat_template": True, "fewshot_as_multiturn": True}
    wanted = own(served, ["tiny_questions"], **settings)
    for args in ({}, {"num_concurrent": 4}):
        given = over_http(
            served, "local-chat-completions", "chat/completions", ["tiny_questions"], args=args, **settings
        )
        assert_equal(given, wanted, ["tiny_questions"])


CHECKS: list[Check] = [
    log_likelihoods_are_transformers_own,
    texts_are_transformers_own,
    chats_are_transformers_own,
]

if __name__ == "__main__":
    torch.set_num_threads(1)
    run(CHECKS)
