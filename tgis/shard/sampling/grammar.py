"""Computes the masks of tokens that rows' grammars allow next.

A separate thread compiles grammars, advances them and computes masks while the model runs. A step waits only
for masks that are not ready when it samples."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import tokenizers
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from torch import Tensor

from tgis.hub.gguf_files import wait_for_tokenizer
from tgis.pb import shard_pb2 as pb

logger = logging.getLogger(__name__)

CACHE_SIZE = 64
STACK_BYTES = 64 << 20
# Higher than the router's limits, because the router has already accepted the grammar.
LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)

Booleans = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]


class GuideError(Exception):
    """Error when the row cannot be served."""


@dataclass(frozen=True)
class Mask:
    allowed: npt.NDArray[np.uint8]  # bit i % 8 of byte i / 8: token i is allowed
    vocab_size: int
    is_complete: bool  # only EOS is allowed

    @cached_property
    def banned(self) -> Booleans:
        """Return bool [vocab_size], True for disallowed tokens."""
        banned: Booleans = np.unpackbits(self.allowed, bitorder="little")[: self.vocab_size] == 0
        return banned

    def allows(self, token_id: int) -> bool:
        return bool(self.allowed[token_id >> 3] >> (token_id & 7) & 1)


class PackedMasks(NamedTuple):
    at: Integers  # [num_guided], indices of rows in [n]
    words: npt.NDArray[np.int32]  # [num_guided, ceil(vocab_size / 32)], see `RowState.masks`
    are_complete: Booleans  # [num_guided], only EOS is allowed


# Waits for the masks after the first draft, after the second one, and so on: rows and their masks. Rows whose
# drafts cannot be accepted so far have none.
DraftMasks = Callable[[], list[tuple[Integers, PackedMasks]]]


@dataclass
class Guide:
    """State of a row's grammar."""

    grammar: pb.Grammar
    eos_token_ids: Integers
    token_ids: list[int]  # generated so far
    pending: Future[None] = field(init=False)  # done when `outcome` is valid
    outcome: Mask | str = ""  # mask for the next token, or an error text
    matcher: LLMatcher | None = None
    owns_grammar: bool = False  # no other row has used the matcher's compiled grammar


class Guides:
    """Guides of the open rows with a grammar. It has its own thread; callers must use one thread only."""

    def __init__(self, load_tokenizer: Callable[[], LLTokenizer], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.unpacks_masks = True  # on the grammar thread; `mask` needs that, `pack_masks` does not
        self._guides: dict[int, Guide] = {}
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # used only by the grammar thread
        self._thread = _start_thread()
        self._tokenizer = self._thread.submit(load_tokenizer)

    def reset(self) -> None:
        self._guides.clear()

    def wait_until_ready(self) -> None:
        try:
            self._load()
        except GuideError as error:
            logger.warning("guided decoding is not available: %s", error)

    def close(self, rows: Integers) -> None:
        for row in rows.tolist() if self._guides else ():
            self._guides.pop(row, None)

    def open(self, message: pb.OpenRow) -> None:
        """Start to compile the message's grammar, if it has one. `mask` and `pack_masks` report its
        errors."""
        self._guides.pop(message.row, None)
        if not message.HasField("grammar"):
            return
        generated = np.frombuffer(message.token_ids, "<i4")[message.prompt_len :]
        eos = np.frombuffer(message.eos_token_ids, "<i4").astype(np.int64)
        guide = Guide(message.grammar, eos[(eos >= 0) & (eos < self._vocab_size)], generated.tolist())
        guide.pending = self._thread.submit(self._advance_all, [(guide, [])])
        self._guides[message.row] = guide

    def mask(self, logits: Tensor, rows: Integers) -> tuple[Booleans, dict[int, str]]:
        """Set the logits [n, vocab_size] of tokens that the rows' grammars disallow to -inf, in place.

        Return bool [n], True where only EOS is allowed, and the problems of rows that cannot be served, by
        index in [n]. Rows without a grammar keep their logits."""
        complete = np.zeros(len(rows), np.bool_)
        problems = dict[int, str]()
        index = []
        banned = []
        for i, mask in self._wait_for_masks(rows, problems):
            complete[i] = mask.is_complete
            index.append(i)
            banned.append(mask.banned)
        if index:
            is_banned = torch.from_numpy(np.stack(banned)).to(logits.device)  # bool [num_guided, vocab_size]
            if len(index) == len(logits):
                logits.masked_fill_(is_banned, -torch.inf)
            else:
                at = torch.tensor(index, device=logits.device)
                logits[at] = logits[at].masked_fill_(is_banned, -torch.inf)
        return complete, problems

    def pack_masks(self, rows: Integers) -> tuple[PackedMasks, dict[int, str]]:
        """Return the masks of the rows [n] with a grammar, and the problems of rows that cannot be served, by
        index in [n]."""
        problems = dict[int, str]()
        masks = list(self._wait_for_masks(rows, problems))
        return self._pack(masks), problems

    def _pack(self, masks: Sequence[tuple[int, Mask]]) -> PackedMasks:
        words = np.zeros((len(masks), -(-self._vocab_size // 32) * 4), np.uint8)
        for i, (_, mask) in enumerate(masks):
            words[i, : len(mask.allowed)] = mask.allowed[: words.shape[1]]
        are_complete = np.array([mask.is_complete for _, mask in masks], np.bool_)
        at = np.array([row_index for row_index, _ in masks], np.int64)
        return PackedMasks(at, words.view("<i4"), are_complete)

    def start_masking(self, drafts: Mapping[int, list[int]]) -> DraftMasks:
        """Start to compute the masks after each of the drafts of rows, of which some have a grammar."""
        work = {row: (self._guides[row], ids) for row, ids in drafts.items() if row in self._guides}
        if not work:
            return list
        pending = self._thread.submit(self._mask_drafts, work)
        return lambda: self._pack_rounds(pending.result())

    def _mask_drafts(self, work: Mapping[int, tuple[Guide, list[int]]]) -> dict[int, list[Mask]]:
        masks = dict[int, list[Mask]]()
        for row, (guide, token_ids) in work.items():
            masks[row] = []
            try:
                for mask in self._follow(guide, token_ids):
                    masks[row].append(mask)
            except Exception:  # the row's next step reports it, if the row gets there
                masks[row].append(
                    Mask(np.zeros(-(-self._vocab_size // 8), np.uint8), self._vocab_size, False)
                )
        return masks

    def _follow(self, guide: Guide, token_ids: list[int]) -> Iterator[Mask]:
        """Yield the mask after each draft, up to the first one that cannot be sampled or ends the row."""
        mask = guide.outcome
        if guide.matcher is None or isinstance(mask, str):
            return
        matcher = guide.matcher.deep_copy()
        for token_id in token_ids:
            if token_id in guide.eos_token_ids or not mask.allows(token_id):
                return
            following = self._compute_mask(guide, matcher, [token_id])
            if following is None:
                raise GuideError(f"its grammar: {_first_line(matcher.get_error())}")
            yield (mask := following)

    def _pack_rounds(self, masks: Mapping[int, list[Mask]]) -> list[tuple[Integers, PackedMasks]]:
        rounds = []
        for number in range(max(map(len, masks.values()), default=0)):
            given = [(row, each[number]) for row, each in masks.items() if number < len(each)]
            packed = self._pack(given)
            rounds.append((packed.at, packed))
        return rounds

    def has_guide(self, rows: Integers) -> Booleans:
        """Return bool [n], True where a row has a grammar."""
        if not self._guides:
            return np.zeros(len(rows), np.bool_)
        return np.array([row in self._guides for row in rows.tolist()], np.bool_)

    def _wait_for_masks(self, rows: Integers, problems: dict[int, str]) -> Iterator[tuple[int, Mask]]:
        """Yield the index in [n] and the mask of each row with a grammar. Add errors to `problems` by
        index."""
        for i, row in self._guided(rows):
            guide = self._guides[row]
            guide.pending.result()
            if isinstance(guide.outcome, str):
                problems[i] = guide.outcome
            else:
                yield i, guide.outcome

    def advance(self, rows: Integers, token_ids: npt.NDArray[np.int32], ended: Booleans) -> None:
        """Append tokens to the rows [n], in which a row occurs once for each token, and start to compute the
        next masks."""
        work = dict[int, list[int]]()
        for i, row in self._guided(rows):
            if not ended[i]:
                work.setdefault(row, []).append(int(token_ids[i]))
        if work:
            guides = [self._guides[row] for row in work]
            pending = self._thread.submit(self._advance_all, list(zip(guides, work.values(), strict=True)))
            for guide in guides:
                guide.pending = pending

    def _guided(self, rows: Integers) -> list[tuple[int, int]]:
        """Return the index and row number of each row with a guide."""
        if not self._guides:
            return []
        return [(i, row) for i, row in enumerate(rows.tolist()) if row in self._guides]

    def _advance_all(self, work: list[tuple[Guide, list[int]]]) -> None:
        # All rows of a step are one task, because submitting a task takes longer than computing most masks.
        for guide, token_ids in work:
            try:
                guide.outcome = self._advance(guide, token_ids)
            except GuideError as error:
                guide.outcome = str(error)
            except Exception as error:  # if a client's grammar breaks the library, only its row may fail
                guide.outcome = f"its grammar cannot be followed: {type(error).__name__}"

    def _advance(self, guide: Guide, token_ids: list[int]) -> Mask:
        """Advance the row's matcher and return its mask.

        Copies of a matcher share a cache of lexer states, and the limit on their number. So if a copied
        matcher fails, the row tries again with its own newly compiled matcher."""
        guide.token_ids += token_ids
        if guide.matcher is None:
            guide.owns_grammar = guide.grammar.digest not in self._compiled
            guide.matcher = self._copy_matcher(guide.grammar)
            token_ids = guide.token_ids
        mask = self._compute_mask(guide, guide.matcher, token_ids)
        if mask is None and not guide.owns_grammar:
            self._compiled.pop(guide.grammar.digest, None)
            guide.matcher = self._compile(guide.grammar)
            guide.owns_grammar = True
            mask = self._compute_mask(guide, guide.matcher, guide.token_ids)
        if mask is None:
            raise GuideError(f"its grammar: {_first_line(guide.matcher.get_error())}")
        return mask

    def _copy_matcher(self, grammar: pb.Grammar) -> LLMatcher:
        if grammar.digest not in self._compiled:
            self._compiled[grammar.digest] = self._compile(grammar)
            if len(self._compiled) > CACHE_SIZE:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar.digest)
        return self._compiled[grammar.digest].deep_copy()

    def _compile(self, grammar: pb.Grammar) -> LLMatcher:
        matcher = LLMatcher(self._load(), grammar.text, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise GuideError(f"its grammar: {_first_line(matcher.get_error())}")
        return matcher

    def _load(self) -> LLTokenizer:
        try:
            return self._tokenizer.result()
        except Exception as error:
            text = f"the tokenizer cannot be used for grammars: {_first_line(str(error))}"
            raise GuideError(text) from error

    def _compute_mask(self, guide: Guide, matcher: LLMatcher, token_ids: list[int]) -> Mask | None:
        """Return the mask after `token_ids`, or None if the matcher has failed."""
        if not matcher.consume_tokens(token_ids):
            return None
        is_accepting = matcher.is_accepting()
        allowed = np.frombuffer(matcher.compute_bitmask(), np.uint8).copy()
        if matcher.is_error():
            return None
        eos = np.array([i for i in self._load().eos_tokens if i < self._vocab_size], np.int64)
        _set_bits(allowed, eos, is_allowed=False)
        _set_bits(allowed, guide.eos_token_ids, is_allowed=False)
        is_complete = not _any_bit(allowed, self._vocab_size)
        if is_accepting:
            _set_bits(allowed, guide.eos_token_ids, is_allowed=True)
        elif is_complete:
            raise GuideError("its grammar allows no further token")
        mask = Mask(allowed, self._vocab_size, is_complete)
        if self.unpacks_masks:
            _ = mask.banned
        return mask


def _set_bits(bits: npt.NDArray[np.uint8], index: Integers, is_allowed: bool) -> None:
    ones = (1 << (index & 7)).astype(np.uint8)
    if is_allowed:
        np.bitwise_or.at(bits, index >> 3, ones)
    else:
        np.bitwise_and.at(bits, index >> 3, ~ones)


def _any_bit(bits: npt.NDArray[np.uint8], count: int) -> bool:
    """Return True if any of the first `count` bits is 1."""
    whole, rest = divmod(count, 8)
    return bool(bits[:whole].any()) or bool(rest and bits[whole] & ((1 << rest) - 1))


class DecodedVocabulary:
    """Vocabulary for a decoder that the library does not support. Each token has the text that it appends."""

    bos_token_id = None

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self.special_token_ids = [i for i, token in added.items() if token.special and i < vocab_size]
        self.eos_token_id = (eos_token_ids or self.special_token_ids or [0])[0]
        middle = next(i for i in range(tokenizer.get_vocab_size()) if tokenizer.decode([i]).strip().isalpha())
        before = tokenizer.decode([middle])
        texts = (tokenizer.decode([middle, i], skip_special_tokens=False) for i in range(vocab_size))
        self.tokens = [text.removeprefix(before).encode() for text in texts]

    def __call__(self, text: str) -> list[int]:
        """Return no tokens, because no supported grammar needs tokenization."""
        return []


def read_tokenizer(directory: Path, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    """Read a model's `tokenizer.json`. Grammars never allow ids below `vocab_size` that have no token."""
    wait_for_tokenizer(directory)
    text = (directory / "tokenizer.json").read_text(encoding="utf-8")
    eos = eos_token_ids or None
    try:
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=eos)
    except ValueError:  # the decoder is unsupported, or the tokenizer has more tokens than the model
        pieces = DecodedVocabulary(tokenizers.Tokenizer.from_str(text), vocab_size, eos_token_ids)
        return LLTokenizer(TokenizerWrapper(pieces), n_vocab=vocab_size, eos_token=eos)


def _start_thread() -> ThreadPoolExecutor:
    """Start a thread with a large stack, because the library processes nested grammars recursively."""
    before = threading.stack_size(STACK_BYTES)
    try:
        pool = ThreadPoolExecutor(1, "grammar")
        pool.submit(threading.get_ident).result()
    finally:
        threading.stack_size(before)
    return pool


def _first_line(text: str) -> str:
    return (text.splitlines() or ["unknown cause"])[0][:200]
