"""Independent model of text and stopping for whole sequences, without state between steps.

For invalid bytes, the library's decoding of the whole sequence (`continuation`) and the text of a stream
(`text`) differ for tokenizers with byte fallback, and only for those. The library decodes a whole run of byte
tokens: one invalid byte makes every byte of the run a replacement character. By then, a stream has already
sent the run's valid beginning. The stream's result is the specified one, also for unary answers: tokens are
decoded in units, and a unit ends with the first token after which its text does not end in a replacement
character."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, takewhile
from typing import Any

import regex
from tokenizers import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
Entry = tuple[str, str, str]
"""Text, name of the stop reason, and stop sequence."""


def begin_of_all(tokenizer: Tokenizer, texts: Sequence[str]) -> list[int]:
    """Return the common first tokens of these texts' encodings."""
    places = zip(*(tokenizer.encode(text).ids for text in texts), strict=False)
    return [ids[0] for ids in takewhile(lambda ids: len({*ids}) == 1, places)]


def continuation(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """Return the library's decoding of all `ids` at once, as the continuation of another text."""
    whole = _decode_at_once(tokenizer, ids, skip_special_tokens)
    return whole if kind_of(tokenizer) in ("BPEDecoder", "none") else whole.rstrip(REPLACEMENT)


def text(
    tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool = True, begins: bool = False
) -> str:
    """Return the specified text of `ids`, which equals `continuation` except for invalid bytes. `begins`:
    nothing precedes it."""
    return _read(tokenizer, ids, skip_special_tokens, begins).whole


def stream(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    stop_sequences: Sequence[str] = (),
    include: bool = True,
    min_new_tokens: int = 0,
    max_new_tokens: int = 20,
    reduced: bool = False,
    eos_ids: Collection[int] = (),
    output_special_tokens: bool = False,
    begins: bool = False,
) -> list[Entry]:
    """Return the text that a stream sends for each token, up to the last one. `ids` may continue after it.
    `begins`: as for `text`."""
    skip, stops = not output_special_tokens, [stop.encode() for stop in stop_sequences]
    hold_back = 0 if not stops else 1 if include else max(map(len, stops))
    entries: list[Entry] = []
    shown = 0
    for n in range(1, len(ids) + 1):
        reading = _read(tokenizer, ids[:n], skip, begins)
        if ids[n - 1] in eos_ids:
            reason, stop, end = "EOS_TOKEN", "", _read(tokenizer, ids[: n - 1], skip, begins).whole.encode()
        elif n >= max(min_new_tokens, max_new_tokens):
            reason, stop, end = "TOKEN_LIMIT" if reduced else "MAX_TOKENS", "", reading.whole.encode()
        else:
            stop, end = _cut(reading, stops, include) if n >= min_new_tokens else ("", b"")
            reason = "STOP_SEQUENCE" if stop else "NOT_FINISHED"
        if reason != "NOT_FINISHED":
            return [*entries, (end[shown:].decode(), reason, stop)]
        certain = "".join(reading.certain).encode()
        until = _num_shown(tokenizer, reading, hold_back)
        entries.append((certain[shown:until].decode(), reason, ""))
        shown = until
    return entries


def kind_of(tokenizer: Tokenizer) -> str:
    decoder = _decoder(tokenizer)
    return decoder["type"] if decoder else "none"


@lru_cache(maxsize=16)
def _decoder(tokenizer: Tokenizer) -> dict[str, Any]:
    return json.loads(tokenizer.to_str())["decoder"] or {}


def _is_one_behind(tokenizer: Tokenizer) -> bool:
    return "BPEDecoder" in str(_decoder(tokenizer))


@dataclass(frozen=True)
class _Reading:
    certain: list[str]
    """Text that each token makes certain."""
    whole: str
    """Text if nothing follows."""


def _read(tokenizer: Tokenizer, ids: Sequence[int], skip: bool, begins: bool) -> _Reading:
    if _is_one_behind(tokenizer):
        return _read_one_behind(tokenizer, ids, skip)
    if begins:
        return _read_beginning(tokenizer, ids, skip)
    certain, start = [], 0
    for end in range(1, len(ids) + 1):
        unit = _decode_at_once(tokenizer, ids[start:end], skip)
        is_whole = not unit.endswith(REPLACEMENT)
        certain.append(unit if is_whole else "")
        start = end if is_whole else start
    rest = _decode_at_once(tokenizer, ids[start:], skip) if start < len(ids) else ""
    return _Reading(certain, "".join(certain) + rest.rstrip(REPLACEMENT))


def _read_beginning(tokenizer: Tokenizer, ids: Sequence[int], skip: bool) -> _Reading:
    """Read ids of vocabularies without byte tokens: each token's addition to the library's own text."""
    assert kind_of(tokenizer) in ("Metaspace", "WordPiece")
    texts = [tokenizer.decode(list(ids[:n]), skip_special_tokens=skip) for n in range(len(ids) + 1)]
    assert all(after.startswith(before) for before, after in pairwise(texts))
    return _Reading([after[len(before) :] for before, after in pairwise(texts)], texts[-1])


def _read_one_behind(tokenizer: Tokenizer, ids: Sequence[int], skip: bool) -> _Reading:
    """Read ids of vocabularies in which the last token's text depends on whether another token follows."""
    texts = []
    for n in range(len(ids) + 1):
        seen = [token for token in ids[:n] if not (skip and token in _special_ids(tokenizer))]
        last = tokenizer.decode(seen[-1:], skip_special_tokens=False)
        texts.append(tokenizer.decode(seen, skip_special_tokens=False).removesuffix(last))
    certain = [after[len(before) :] for before, after in pairwise(texts)]
    return _Reading(certain, tokenizer.decode(ids, skip_special_tokens=skip))


def _decode_at_once(tokenizer: Tokenizer, ids: Sequence[int], skip: bool) -> str:
    ids, kind = list(ids), kind_of(tokenizer)
    if kind in ("Sequence", "Metaspace", "WordPiece") and not _is_one_behind(tokenizer):
        placeholder = tokenizer.encode("A", add_special_tokens=False).ids[0]
        before = tokenizer.decode([placeholder])
        return tokenizer.decode([placeholder, *ids], skip_special_tokens=skip).removeprefix(before)
    whole: str = tokenizer.decode(ids, skip_special_tokens=skip)
    return " " + whole if kind == "none" and whole else whole


def _special_ids(tokenizer: Tokenizer) -> set[int]:
    return {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def _cut(reading: _Reading, stops: Sequence[bytes], include: bool) -> tuple[str, bytes]:
    """Return the stop sequence that includes a byte of the last token, and the text up to the cut."""
    text = "".join(reading.certain).encode()
    num_old = len("".join(reading.certain[:-1]).encode())
    for stop in stops:
        ends = [end for end in range(num_old + 1, len(text) + 1) if text[:end].endswith(stop)]
        if ends:
            return stop.decode(), text[: ends[-1] if include else ends[-1] - len(stop)]
    return "", text


def _num_shown(tokenizer: Tokenizer, reading: _Reading, hold_back: int) -> int:
    """Return how many bytes of the certain text are sent after the last token."""
    shown = 0
    for n in range(1, len(reading.certain) + 1):
        if not reading.certain[n - 1]:
            continue
        so_far = "".join(reading.certain[:n])
        total, added = len(so_far.encode()), len(reading.certain[n - 1].encode())
        if kind_of(tokenizer) in ("ByteLevel", "Sequence"):
            ends, cutoff = _cluster_starts(so_far), total - (hold_back + added if hold_back else 0)
        else:
            ends = [len("".join(reading.certain[:i]).encode()) for i in range(n + 1)]
            cutoff = total - hold_back
        shown = max(shown, *(end for end in [0, *ends] if end <= cutoff), 0)
    return shown


def _cluster_starts(text: str) -> list[int]:
    return [len(text[: cluster.start()].encode()) for cluster in regex.finditer(r"\X", text)]
