"""The engine alone as a contender; a worker process whose arguments are the model's directory, the type of
its weights and the tokens that its cache shall hold."""

import gc
import sys
import time
from pathlib import Path
from typing import Any

from bench import worker
from bench.steps import Rows, load_engine
from tgis.shard.engine import Engine

MAX_STEP_TOKENS = 2048  # of prompts


def generate(engine: Engine, question: dict[str, Any]) -> dict[str, float]:
    """Seconds that the steps take which make as many tokens; they are made before."""
    new_tokens = question["new_tokens"]
    rows = Rows(engine, question["batch"], question["input_tokens"], new_tokens, question["seed"])
    steps = [*rows.prefill(MAX_STEP_TOKENS), *(rows.decode() for _ in range(new_tokens - 1))]
    engine.reset()
    start = time.perf_counter()
    for step in steps:
        engine.execute(step)
    return {"seconds": time.perf_counter() - start}


def main() -> None:
    directory, dtype, cache_tokens = sys.argv[1:]
    engine = load_engine(Path(directory), dtype, int(cache_tokens))
    gc.freeze()
    gc.disable()
    worker.serve(lambda question: generate(engine, question))


if __name__ == "__main__":
    main()
