"""Defines Sequence, the state of one generation and the settings of its request. The scheduler, the shard
client and the engine share these types."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from tgis.sampling_parameters import Sampling


class StopReason(Enum):
    """Reason for the end of a generation, with the names and numbers of the public protocol."""

    NOT_FINISHED = 0
    MAX_TOKENS = 1
    EOS_TOKEN = 2
    CANCELLED = 3
    TIME_LIMIT = 4
    STOP_SEQUENCE = 5
    TOKEN_LIMIT = 6
    ERROR = 7


_NOT_FINISHED = StopReason.NOT_FINISHED  # cached, because every token needs it


@dataclass(frozen=True)
class Stopping:
    """Limits that end a generation. They exclude stop sequences, because the engine has no text."""

    max_new_tokens: int
    min_new_tokens: int = 0
    reduced: bool = False
    """True if max_new_tokens is below the requested value, because the model's length leaves less room."""
    eos_token_ids: frozenset[int] = frozenset()
    deadline: float | None = None
    """Time on the monotonic clock, in seconds."""

    def reason_at(self, num_generated: int, token_id: int, now: float) -> StopReason:
        """Return the stop reason after `num_generated` tokens, the last one `token_id`, in TGIS's order."""
        if self.deadline is not None and now > self.deadline:
            return StopReason.TIME_LIMIT
        # The shards mask these ids before min_new_tokens, unless a grammar allows no other token.
        if token_id in self.eos_token_ids:
            return StopReason.EOS_TOKEN
        if num_generated < self.min_new_tokens:
            return _NOT_FINISHED
        if num_generated >= self.max_new_tokens:
            return StopReason.TOKEN_LIMIT if self.reduced else StopReason.MAX_TOKENS
        return _NOT_FINISHED


@dataclass(frozen=True)
class Details:
    """Token details that a client requests."""

    generated_tokens: bool = False
    input_tokens: bool = False
    logprobs: bool = False
    ranks: bool = False
    top_n: int = 0
    raw: bool = False
    """True if the details of generated tokens come from the model's unmodified logits."""


@dataclass(frozen=True)
class CacheSalt:
    """Salt of the prefix cache. Only sequences with equal salts share cached blocks, so that clients cannot
    detect the prompts of others."""

    tenant: str = ""
    """Name from the caller's certificate or token; empty if there is none."""
    salt: bytes = b""
    """Salt from the request."""


@dataclass(frozen=True)
class Grammar:
    """Grammar that the text must match, in the form that the shards read, and the digest of that form."""

    text: str
    digest: str
    field: str
    """Request field from which the grammar comes."""


class AdapterKind(Enum):
    """Kind of adapter, with the numbers of the protocol between router and shards."""

    SOFT_PROMPT = 1
    LORA = 2

    @property
    def label(self) -> str:
        return "soft prompt" if self is AdapterKind.SOFT_PROMPT else "LoRA adapter"


@dataclass(frozen=True, eq=False)
class AdapterInfo:
    """A soft prompt or LoRA adapter as the shards report it, compared by identity: one object per load."""

    kind: AdapterKind
    digest: str
    """Digest of the content; equal for equal contents."""
    num_decoder_tokens: int = 0
    """Number of virtual tokens before the decoder's tokens."""
    num_encoder_tokens: int = 0
    """Number of virtual tokens before the encoder's tokens."""
    num_bytes: int = 0
    """Maximum number of bytes that the loaded adapter takes in a shard."""


@dataclass(frozen=True)
class CallAdapters:
    """Adapters that all inputs of a call use."""

    soft_prompt: AdapterInfo | None = None
    lora: AdapterInfo | None = None
    lora_id: str = ""
    """Id of the LoRA adapter in the call, for metrics."""

    @property
    def present(self) -> tuple[AdapterInfo, ...]:
        return tuple(info for info in (self.lora, self.soft_prompt) if info is not None)

    @property
    def digests(self) -> tuple[str, str]:
        """Digests of the soft prompt and of the LoRA adapter; empty if there is none."""
        return _digest(self.soft_prompt), _digest(self.lora)

    @property
    def prefix_root(self) -> Hashable:
        """Key of the adapters in the prefix cache: only sequences with equal roots share cached blocks."""
        return tuple((info.kind, info.digest) for info in self.present)

    @property
    def num_decoder_tokens(self) -> int:
        """Number of the decoder's virtual tokens."""
        return self.soft_prompt.num_decoder_tokens if self.soft_prompt else 0

    @property
    def num_encoder_tokens(self) -> int:
        """Number of the encoder's virtual tokens."""
        return self.soft_prompt.num_encoder_tokens if self.soft_prompt else 0

    @property
    def num_virtual_tokens(self) -> int:
        return self.num_decoder_tokens + self.num_encoder_tokens


def _digest(info: AdapterInfo | None) -> str:
    return "" if info is None else info.digest


class TokenDetail(NamedTuple):
    """A token and its requested details. Fields that were not requested are 0 or empty."""

    token_id: int
    logprob: float = 0.0
    rank: int = 0
    top_tokens: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and logprob, most probable first."""


@dataclass(eq=False)
class Siblings:
    """Sequences of one call that have the same prompt."""

    newest: "Sequence | None" = None
    """Running sibling that was admitted last. The others wait for the blocks that they can share with it."""


@dataclass(eq=False)
class Sequence:
    """Tokens, limits and cache state of one generation. It is compared by identity."""

    token_ids: list[int]
    """Padding in place of the virtual tokens, the prompt, and the generated tokens that the router knows. For
    an encoder-decoder model, the prompt is the decoder's start token."""
    stopping: Stopping
    sampling: Sampling = field(default_factory=Sampling)
    details: Details = Details()
    grammar: Grammar | None = None
    request_id: str = ""
    """Id of the call in the log and in the internal errors that clients see."""
    adapters: CallAdapters = CallAdapters()
    encoder_token_ids: tuple[int, ...] = ()
    """Padding in place of the virtual tokens, and the input; encoder-decoder models only."""
    cache_salt: CacheSalt = CacheSalt()
    siblings: Siblings = field(default_factory=Siblings)
    priority: int = 0
    """Sequences with lower values are admitted first."""
    prompt_len: int = field(init=False)
    max_tokens: int = field(init=False)
    """Maximum length of token_ids."""

    # The scheduler owns the fields from here on.
    row: int | None = None
    """Row in the shards' row tables while the sequence is running."""
    num_scheduled: int = 0
    """Number of tokens that the steps sent so far compute."""
    num_computed: int = 0
    """Number of tokens that the answered steps have computed."""
    num_unanswered: int = 0
    """Number of sampled tokens after token_ids that the shards have not returned yet."""
    is_speculating: bool = False
    """True while an unanswered step has drafts for the sequence. Such a step may return several tokens."""
    block_table: list[int] = field(default_factory=list)
    cross_blocks: list[int] = field(default_factory=list)
    """Blocks of the encoder's output."""
    num_to_encode: int = 0
    """Number of encoder tokens that the step which opens the row computes. It is 0 once that step is
    answered, or if the cross blocks were cached."""
    state_slot: int | None = None
    """Slot of the state, if the sequence is running and the model keeps one."""
    state_source: int | None = None
    """Slot with the state before the first token that the sequence computes; None: no token precedes it."""
    is_followed: bool = False
    """True if the shards' speculator has followed the sequence since its admission, so that it can propose
    drafts."""
    is_long: bool = False
    """True if the row uses the long rotary frequencies, because the short ones cover too few tokens."""
    num_published: int = 0
    """Number of leading blocks that other sequences can find in the prefix cache."""
    published_prefix: Hashable = ()
    """Key of the published prefix in the prefix cache."""
    num_inputs_reported: int = 0
    """Number of prompt tokens whose details have been delivered."""
    num_fatal_steps: int = 0
    """Number of consecutive fatal steps that had no other sequence."""

    def __post_init__(self) -> None:
        self.prompt_len = len(self.token_ids)
        self.max_tokens = self.prompt_len + self.stopping.max_new_tokens

    def resume(self, generated: Iterable[int], has_inputs: bool) -> None:
        """Add the tokens that another engine process generated, before the scheduler has the sequence. With
        `has_inputs`, the details of the input tokens are not reported again."""
        self.token_ids += generated
        if has_inputs:
            self.num_inputs_reported = self.prompt_len

    @property
    def num_input_tokens(self) -> int:
        """Number of input tokens as clients and metrics count them, without virtual tokens."""
        if self.encoder_token_ids:
            return len(self.encoder_token_ids) - self.adapters.num_encoder_tokens
        return self.prompt_len - self.adapters.num_decoder_tokens

    @property
    def num_computed_inputs(self) -> int:
        """Number of a running sequence's input tokens, without virtual tokens, that are in the cache."""
        if self.encoder_token_ids:
            return 0 if self.num_to_encode else self.num_input_tokens
        num_computed = self.num_computed - self.adapters.num_decoder_tokens
        return min(max(num_computed, 0), self.num_input_tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_unanswered

    @property
    def num_pending(self) -> int:
        return self.num_tokens - self.num_scheduled

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def reached_limit(self) -> bool:
        return self.num_tokens >= self.max_tokens

    @property
    def inputs_reported(self) -> bool:
        """True if the shards will not report further details of input tokens."""
        if not self.details.input_tokens or self.encoder_token_ids:
            return True
        return self.num_inputs_reported >= self.prompt_len
