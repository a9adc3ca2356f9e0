"""One generation in progress and everything it was asked for. The scheduler, the link and the engine all
speak it."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class StopReason(Enum):
    """Why a generation ended, named and numbered as on the wire."""

    NOT_FINISHED = 0
    MAX_TOKENS = 1
    EOS_TOKEN = 2
    CANCELLED = 3
    TIME_LIMIT = 4
    STOP_SEQUENCE = 5
    TOKEN_LIMIT = 6
    ERROR = 7


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; the defaults leave the distribution as it is."""

    greedy: bool = True
    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    length_penalty_start: int = 0
    length_penalty_factor: float = 1.0


@dataclass(frozen=True)
class Stopping:
    """When a generation ends, beside its own end-of-sequence token."""

    max_new_tokens: int
    min_new_tokens: int = 0
    reduced: bool = False
    """Whether max_new_tokens is less than was asked for, because the model's length leaves no more room."""
    stop_sequences: tuple[str, ...] = ()
    include_stop_sequence: bool = True
    eos_token_ids: frozenset[int] = frozenset()
    deadline: float | None = None
    """On the monotonic clock, in seconds."""


@dataclass(frozen=True)
class Details:
    """What a client wants to know of each token."""

    generated_tokens: bool = False
    input_tokens: bool = False
    logprobs: bool = False
    ranks: bool = False
    top_n: int = 0


@dataclass(frozen=True)
class Grammar:
    """What the generated text must match, in the form that shards read, and that text's digest."""

    text: str
    digest: str
    field: str
    """The field of the request that says so."""


class ContentKind(Enum):
    """What can be loaded beside the model, numbered as on the link to the shards."""

    PROMPT = 1
    ADAPTER = 2


@dataclass(frozen=True, eq=False)
class Content:
    """A soft prompt or an adapter as the shards have found it; compared by identity, which is one loading."""

    kind: ContentKind
    digest: str
    """Equal contents have one digest."""
    num_decoder_tokens: int = 0
    """Virtual tokens before those of the decoder ..."""
    num_encoder_tokens: int = 0
    """... and before those of the encoder."""
    num_bytes: int = 0
    """That a shard needs at most to hold it loaded."""


@dataclass(frozen=True)
class Tuning:
    """What a call's inputs are computed with, beside the model."""

    prompt: Content | None = None
    adapter: Content | None = None

    @property
    def contents(self) -> tuple[Content, ...]:
        return tuple(content for content in (self.adapter, self.prompt) if content is not None)

    @property
    def prefix_root(self) -> Hashable:
        """Equal where what is cached of equal tokens is equal."""
        return tuple((content.kind, content.digest) for content in self.contents)

    @property
    def num_decoder_tokens(self) -> int:
        """Virtual tokens."""
        return self.prompt.num_decoder_tokens if self.prompt else 0

    @property
    def num_encoder_tokens(self) -> int:
        """Virtual tokens."""
        return self.prompt.num_encoder_tokens if self.prompt else 0


class TokenDetail(NamedTuple):
    """A token and what was asked for about it; fields nobody asked for are 0 or empty."""

    token_id: int
    logprob: float = 0.0
    rank: int = 0
    top_tokens: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), most probable first."""


@dataclass(eq=False)
class Sequence:
    """Tokens, limits and place in the cache of one generation; compared by identity."""

    token_ids: list[int]
    """Prompt and generated tokens as far as the router knows them, behind padding for the virtual tokens. For
    an encoder-decoder model the prompt is the one token that its decoder starts from."""
    stopping: Stopping
    sampling: Sampling = Sampling()
    details: Details = Details()
    grammar: Grammar | None = None
    request_id: str = ""
    """Of the call it belongs to, in the log and in what a client is told of an internal error."""
    tuning: Tuning = Tuning()
    prefix_root: Hashable = field(init=False)
    """Sequences share what is cached only under equal roots."""
    encoder_token_ids: tuple[int, ...] = ()
    """The input behind its virtual tokens, for an encoder-decoder model."""
    prompt_len: int = field(init=False)
    max_tokens: int = field(init=False)
    """Prompt and new tokens, at most."""

    # What follows belongs to the scheduler.
    row: int | None = None
    """Place in the shards' tables while running."""
    num_scheduled: int = 0
    """Tokens whose computation has been sent ..."""
    num_computed: int = 0
    """... and answered."""
    num_unanswered: int = 0
    """Sampled tokens that are not back yet; they follow token_ids."""
    is_speculating: bool = False
    """An unanswered step has drafts of it, which may bring more tokens than one."""
    block_table: list[int] = field(default_factory=list)
    cross_blocks: list[int] = field(default_factory=list)
    """Hold what the encoder makes of its input."""
    num_to_encode: int = 0
    """Encoder tokens to be computed with the step that opens the row; 0 where the cross blocks had them."""
    is_long: bool = False
    """The row was opened with more tokens than the model's rotary frequencies are for; it has others."""
    num_published: int = 0
    """Leading blocks that other sequences can find ..."""
    published_prefix: Hashable = ()
    """... and the prefix they spell."""
    num_inputs_reported: int = 0
    """Prompt tokens whose details have been delivered."""
    num_fatal_steps: int = 0
    """In a row, in which it was alone."""

    def __post_init__(self) -> None:
        self.prompt_len = len(self.token_ids)
        self.max_tokens = self.prompt_len + self.stopping.max_new_tokens
        self.prefix_root = self.tuning.prefix_root

    @property
    def num_input_tokens(self) -> int:
        """What a client calls the input, and metrics count: no virtual tokens."""
        if self.encoder_token_ids:
            return len(self.encoder_token_ids) - self.tuning.num_encoder_tokens
        return self.prompt_len - self.tuning.num_decoder_tokens

    @property
    def num_virtual_tokens(self) -> int:
        return self.tuning.num_decoder_tokens + self.tuning.num_encoder_tokens

    @property
    def num_tokens(self) -> int:
        """Known and unanswered tokens."""
        return len(self.token_ids) + self.num_unanswered

    @property
    def num_pending(self) -> int:
        """Tokens that no step computes yet."""
        return self.num_tokens - self.num_scheduled

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def reached_limit(self) -> bool:
        """No further token may be sampled; counts the unanswered ones."""
        return self.num_tokens >= self.max_tokens

    @property
    def inputs_reported(self) -> bool:
        """Nothing (more) is to be learnt from the shards about the input."""
        if not self.details.input_tokens or self.encoder_token_ids:
            return True
        return self.num_inputs_reported >= self.prompt_len
