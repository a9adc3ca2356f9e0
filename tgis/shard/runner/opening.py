"""Reads an `OpenRow` message into the row table's format, and finds out why a row cannot be served."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tgis.pb import shard_pb2 as pb
from tgis.shard.adapters.registry import LoadedPrompt
from tgis.shard.layers.lora import Adapter

Column = npt.NDArray[np.int32]

NOT_WANTED = np.iinfo(np.int64).max
ROW = np.dtype(
    [
        ("open", np.bool_),
        ("ended", np.bool_),
        ("length", np.int64),  # number of prompt and generated tokens, which is the next token's position
        ("prompt_len", np.int64),
        ("limit", np.int64),  # the length at which the row ends
        ("num_blocks", np.int64),
        ("encoder_len", np.int64),
        ("is_long", np.bool_),  # True if longer than `rope_switch_len`
        ("logprobs", np.bool_),
        ("ranks", np.bool_),
        ("top_n", np.int64),
        ("input_from", np.int64),  # first prompt token to report, or NOT_WANTED
    ]
)


@dataclass(frozen=True)
class Limits:
    """Limits of rows, and the model's properties that decide how rows are computed."""

    max_sequence_length: int  # limit of the decoder's tokens, and of the encoder's
    block_size: int
    vocab_size: int
    rope_switch_len: int  # length past which rotary positions are scaled differently; 0 means never
    is_encoder_decoder: bool


def read_column(column: bytes) -> Column:
    return np.frombuffer(column, "<i4")


def read_row(message: pb.OpenRow, limits: Limits) -> tuple[bool | int, ...]:
    """Return the fields of ROW, in their order."""
    details, length = message.details, len(read_column(message.token_ids))
    limit = message.prompt_len + message.max_new_tokens
    counts = (length, message.prompt_len, limit, 0, len(read_column(message.encoder_token_ids)))
    is_long = length > limits.rope_switch_len > 0
    input_from = details.input_from if details.input_tokens else NOT_WANTED
    return True, length >= limit, *counts, is_long, details.logprobs, details.ranks, details.top_n, input_from


def read_parameters(sampling: pb.Sampling) -> tuple[bool | int | float, ...]:
    """Return the fields of PARAMETERS, in their order. A greedy row gets neutral values from the seed to
    typical_p."""
    choice: tuple[bool | int | float, ...] = (True, 0, 1.0, 0, 1.0, 1.0)
    if not sampling.greedy:
        choice = (
            False,
            sampling.seed,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.typical_p,
        )
    length_penalty = sampling.length_penalty_start, sampling.length_penalty_factor
    return *choice, sampling.repetition_penalty, sampling.min_new_tokens, *length_penalty


def find_problem(message: pb.OpenRow, limits: Limits) -> str | None:
    token_ids = read_column(message.token_ids)
    limit, longest = message.prompt_len + message.max_new_tokens, limits.max_sequence_length
    if len(token_ids) == 0:
        return "there is no token to begin with"
    if _has_unknown(token_ids, limits):
        return f"a token id is not below the model's vocabulary size {limits.vocab_size}"
    if max(limit, len(token_ids)) > longest:
        return f"{limit} tokens are more than the sequence length {longest}"
    problem = _find_encoder_problem(message, limits) if limits.is_encoder_decoder else None
    if message.encoder_token_ids and not limits.is_encoder_decoder:
        problem = "the model has no encoder"
    return problem


def find_missing(message: pb.OpenRow, prompt: LoadedPrompt | None, adapter: Adapter | None) -> str | None:
    """Return why a row cannot be served with the soft prompt and adapter that were looked up for it, or
    None."""
    if message.prompt_digest and prompt is None:
        return "its soft prompt is not loaded"
    if message.adapter_digest and adapter is None:
        return "its adapter is not loaded"
    if prompt is None:
        return None
    lengths = message.prompt_len, len(read_column(message.encoder_token_ids))
    if len(prompt.decoder) > lengths[0] or len(prompt.encoder) > lengths[1]:
        return "it has fewer tokens than its soft prompt"
    return None


def _find_encoder_problem(message: pb.OpenRow, limits: Limits) -> str | None:
    token_ids, num_blocks = read_column(message.encoder_token_ids), len(read_column(message.cross_blocks))
    if len(token_ids) == 0:
        return "there is no token for the encoder"
    if _has_unknown(token_ids, limits):
        return f"a token id for the encoder is not below the model's vocabulary size {limits.vocab_size}"
    if len(token_ids) > limits.max_sequence_length:
        return f"{len(token_ids)} tokens for the encoder are more than {limits.max_sequence_length}"
    if len(token_ids) > num_blocks * limits.block_size:
        return f"{len(token_ids)} tokens for the encoder do not fit into {num_blocks} cross blocks"
    return None


def _has_unknown(token_ids: Column, limits: Limits) -> bool:
    return bool(token_ids.min() < 0 or token_ids.max() >= limits.vocab_size)
