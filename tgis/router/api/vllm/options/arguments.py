"""Rewrites vLLM's command lines: underscores in flags, several values after one flag, switches with a value
or the prefix `no`, and a model before all flags."""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence

from tgis.config.serving import GENERATION_CONFIG_NONE
from tgis.router.api.vllm.options.values import SEPARATOR

SEVERAL = {
    "--served-model-name": ",",
    "--cudagraph-capture-sizes": ",",
    "--cuda-graph-sizes": ",",
    "--lora-modules": SEPARATOR,
    "--api-key": SEPARATOR,
}
"""Flags that accept several words, with the separator for the joined value."""
VALUES: Mapping[str, Mapping[str, str | None]] = {
    "--dtype": {"half": "float16", "float": "float32", "auto": None},
    "--generation-config": {"vllm": GENERATION_CONFIG_NONE},
}
"""vLLM's own values of flags that both servers have, with this service's value; None removes the flag."""


def rewrite(arguments: Sequence[str], switches: Collection[str]) -> list[str]:
    """Return the command line in this service's syntax. `switches` are the flags without a value."""
    words = deque(arguments)
    rewritten: list[str] = []
    if words and not words[0].startswith("-"):
        rewritten += ["--model", words.popleft()]
    while words:
        rewritten += _rewrite_next(words, switches)
    return rewritten


def _rewrite_next(words: deque[str], switches: Collection[str]) -> Iterator[str]:
    """Remove the next word, with its values if it is a flag with another syntax. Yield the rewritten
    words."""
    word = words.popleft()
    flag, equals, value = word.partition("=")
    if not word.startswith("--") or not flag.strip("-"):
        yield word
        return
    flag = flag.replace("_", "-")
    positive = flag if flag in switches else flag.replace("--no-", "--", 1)
    if flag in SEVERAL:
        values = [value] if equals else list(_values(words))
        yield from (flag, SEVERAL[flag].join(values)) if values else (flag,)
    elif flag in VALUES and (equals or words):
        theirs = value if equals else words.popleft()
        own = VALUES[flag].get(theirs, theirs)
        yield from (flag, own) if own is not None else ()
    elif positive in switches:
        yield from _switch(positive, flag == positive, value if equals else _truth(words))
    else:
        yield flag + equals + value


def _values(words: deque[str]) -> Iterator[str]:
    while words and not words[0].startswith("-"):
        yield words.popleft()


def _truth(words: deque[str]) -> str:
    """Remove and return the next word if it is a truth value. Otherwise return "true"."""
    return words.popleft() if words and words[0].lower() in ("true", "false") else "true"


def _switch(flag: str, is_positive: bool, value: str) -> Iterator[str]:
    """Yield the switch if it is on, and nothing if it is off."""
    if (value.lower() == "true") == is_positive:
        yield flag
