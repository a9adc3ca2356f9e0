"""Limits the number of the router's files that run for one gRPC text."""

from bench.request_path import is_counted, record

MAX_FILES = 26
MUST_RUN = {
    "api/fmaas/servicer.py",
    "api/service.py",
    "requests/validation.py",
    "text/tokenizer.py",
    "engine/engine.py",
    "shards/codec.py",
}


async def test_a_text_passes_few_files() -> None:
    recorder = await record()
    files = [name for name in recorder.lines if is_counted(name)]
    assert MUST_RUN.issubset(files)
    assert len(files) <= MAX_FILES, sorted(files)
