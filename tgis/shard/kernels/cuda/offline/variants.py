"""Launches, on the meta device, whose kernels an installation compiles in advance: those of well-known
models.

Kernels are specific to shapes, so other models compile theirs while loading."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from tgis.shard.attention.interface import Heads, Scoring
from tgis.shard.kernels.cuda.attend_tiles import tile_tokens
from tgis.shard.kernels.cuda.check.code_inputs import LAYOUTS, draw_packed
from tgis.shard.kernels.cuda.check.inputs import INPUTS, Draw, ExpertSizes, draw_delta, draw_mamba
from tgis.shard.kernels.cuda.codes.multiply_codes import STAGES
from tgis.shard.kernels.cuda.few_rows.multiply_few import MAX_ROWS, count_parts
from tgis.shard.kernels.cuda.functions.float8 import FLOAT8_TYPES
from tgis.shard.kernels.cuda.grouped.expert_table import (
    FEW_ROWS,
    MANY_ROWS,
    ExpertMatrices,
    ExpertTable,
)
from tgis.shard.kernels.cuda.grouped.group_rows import RowTiles
from tgis.shard.kernels.cuda.grouped.slots import (
    MAX_ALIGNMENT,
    MAX_RANK,
    TILE,
    AdapterSlots,
    TermBounds,
)
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.kernels.cuda.states.chunks import Spans, StateMemory
from tgis.shard.kernels.cuda.states.keep_inputs import HeadInputs
from tgis.shard.kernels.cuda.step_state import (
    MAX_BIASES,
    MAX_STOP_IDS,
    MAX_TOPS,
    STATE_CHUNK,
    DetailQuestions,
    DeviceDetails,
    RowState,
    Segments,
    StagedStep,
    StepTensors,
    Word,
)
from tgis.shard.layers.activation import CLAMPED_SWIGLU
from tgis.shard.layers.ops import Activation, HeadNorm
from tgis.shard.memory.state_cache import StateCache, StateShape, StateSizes

BLOCK_SIZE, NUM_BLOCKS, MAX_BLOCKS = 16, 64, 128
MAX_SEQ_LEN = BLOCK_SIZE * MAX_BLOCKS
DTYPES = (torch.bfloat16, torch.float16)
REACH = 128  # reach of relative position biases
NUM_TOKENS = 24  # tokens of a step
NUM_OUTPUTS, WIDE, NARROW = 128, 4096, 112  # a wide matrix of codes is multiplied in parts


class Variant(NamedTuple):
    kernel: str  # name in `Implementations`
    label: str
    run: Callable[[], object]


@dataclass(frozen=True)
class ModelShape:
    """Sizes and features for which a model's kernels are compiled."""

    name: str
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    activation: str = "silu"
    is_gated: bool = True
    is_centred: bool = False  # layer norm
    has_norm_bias: bool = False
    rotated: int | None = None  # rotated channels per head; None: all
    has_head_norm: bool = False
    has_slopes: bool = False
    has_sinks: bool = False
    windows: tuple[int | None, ...] = (None,)  # distinct windows of the layers
    chunk: int | None = None  # length of chunks, which some layers have
    soft_cap: float | None = None
    has_encoder: bool = False  # also has relative position biases and cross-attention
    mamba: StateSizes | None = None  # of Mamba 2 layers
    delta: StateSizes | None = None  # of gated DeltaNet layers
    shards: tuple[int, ...] = (1,)
    has_adapters: bool = False  # kernels of LoRA adapters are compiled, too
    experts: ExpertSizes | None = None
    num_active: int = 0  # experts per token
    has_expert_biases: bool = False
    scales_input: bool = False  # of experts
    has_float8_cache: bool = False  # kernels of caches of 8-bit floats are compiled, too

    def divided(self, size: int) -> "ModelShape":
        """Return the shape of one of `size` ranks. Sampling uses the whole vocabulary."""
        return replace(
            self,
            name=f"{self.name}/{size}",
            ffn_size=self.ffn_size // size,
            num_heads=self.num_heads // size,
            num_kv_heads=max(1, self.num_kv_heads // size),
            experts=self.experts and self.experts._replace(size=self.experts.size // size),
        )

    @property
    def states(self) -> StateSizes | None:
        return self.mamba or self.delta


@dataclass(frozen=True)
class LayerNormShape(ModelShape):
    activation: str = "gelu_tanh"
    is_gated: bool = False
    is_centred: bool = True
    has_norm_bias: bool = True
    rotated: int | None = 0


# Sizes: hidden, feed-forward, heads, key/value heads, channels per head, vocabulary.
MODELS = (
    ModelShape(
        "llama-3.1-8b",
        4096,
        14336,
        32,
        8,
        128,
        128256,
        shards=(1, 2),
        has_adapters=True,
        has_float8_cache=True,
    ),
    ModelShape("llama-3.3-70b", 8192, 28672, 64, 8, 128, 128256, shards=(2, 4, 8)),
    ModelShape("llama-3.2-1b", 2048, 8192, 32, 8, 64, 128256, has_float8_cache=True),
    ModelShape("llama-3.2-3b", 3072, 8192, 24, 8, 128, 128256),
    ModelShape("smollm2-135m", 576, 1536, 9, 3, 64, 49152),
    ModelShape("mistral-7b", 4096, 14336, 32, 8, 128, 32768, windows=(None, 4096)),
    ModelShape("granite-3.3-2b", 2048, 8192, 32, 8, 64, 49159),
    ModelShape("granite-3.3-8b", 4096, 12800, 32, 8, 128, 49159),
    ModelShape(
        *("gemma-2-9b", 3584, 14336, 16, 8, 256, 256000, "gelu_tanh"),
        windows=(None, 4096),
        soft_cap=50.0,
        has_float8_cache=True,
    ),
    ModelShape(
        "gemma-3-1b", 1152, 6912, 4, 1, 256, 262144, "gelu_tanh", has_head_norm=True, windows=(None, 512)
    ),
    ModelShape("qwen2.5-7b", 3584, 18944, 28, 4, 128, 152064, shards=(1, 2)),
    ModelShape("qwen3-0.6b", 1024, 3072, 16, 8, 128, 151936, has_head_norm=True),
    ModelShape("qwen3-8b", 4096, 12288, 32, 8, 128, 151936, has_head_norm=True, has_float8_cache=True),
    ModelShape("phi-3-mini", 3072, 8192, 32, 32, 96, 32064, windows=(2047,)),
    ModelShape("phi-4", 5120, 17920, 40, 10, 128, 100352),
    ModelShape(
        *("gpt-oss-20b", 2880, 2880, 64, 8, 64, 201088, CLAMPED_SWIGLU),
        windows=(None, 128),
        has_sinks=True,
        experts=ExpertSizes(2880, 2880),
        num_active=4,
        has_expert_biases=True,
        has_float8_cache=True,
    ),
    ModelShape(
        *("qwen3-30b-a3b", 2048, 768, 32, 4, 128, 151936),
        has_head_norm=True,
        experts=ExpertSizes(2048, 768),
        num_active=8,
    ),
    ModelShape(
        "mixtral-8x7b",
        4096,
        14336,
        32,
        8,
        128,
        32000,
        shards=(2,),
        experts=ExpertSizes(4096, 14336),
        num_active=2,
    ),
    ModelShape("granite-swash-2b", 2560, 8192, 20, 4, 128, 100352, windows=(None, 128), has_sinks=True),
    ModelShape("olmo-2-7b", 4096, 11008, 32, 32, 128, 100352),
    ModelShape("olmo-3-7b", 4096, 11008, 32, 32, 128, 100278, windows=(None, 4096)),
    ModelShape("smollm3-3b", 2048, 11008, 16, 4, 128, 128256),
    ModelShape("ministral-3-8b", 4096, 14336, 32, 8, 128, 131072),
    ModelShape(
        *("llama-4-scout", 5120, 8192, 40, 8, 128, 202048),
        has_head_norm=True,
        chunk=8192,
        shards=(2,),
        experts=ExpertSizes(5120, 8192),
        num_active=1,
        scales_input=True,
    ),
    ModelShape(
        *("glm-4.5-air", 4096, 1408, 96, 8, 128, 151552),
        rotated=64,
        shards=(2,),
        experts=ExpertSizes(4096, 1408),
        num_active=8,
    ),
    ModelShape(
        *("granite-4.0-h-tiny", 1536, 1024, 12, 4, 128, 100352),
        mamba=StateSizes(48, 64, 1, 128, 4),
        experts=ExpertSizes(1536, 512),
        num_active=6,
    ),
    ModelShape("nemotron-h-8b", 4096, 21504, 32, 8, 128, 131072, mamba=StateSizes(128, 64, 8, 128, 4)),
    ModelShape("falcon-h1-7b", 3072, 12288, 12, 2, 128, 130048, mamba=StateSizes(24, 128, 1, 256, 4)),
    ModelShape(
        *("qwen3-next-80b", 2048, 512, 16, 2, 256, 151936),
        delta=StateSizes(32, 128, 16, 128, 4),
        experts=ExpertSizes(2048, 512),
        num_active=10,
    ),
    LayerNormShape("gpt2-xl", 1600, 6400, 25, 25, 64, 50257),
    LayerNormShape("gpt-neox-20b", 6144, 24576, 64, 64, 96, 50432, rotated=24, shards=(1, 2)),
    LayerNormShape("opt-2.7b", 2560, 10240, 32, 32, 80, 50272, activation="relu"),
    LayerNormShape("starcoder", 6144, 24576, 48, 1, 128, 49152, has_float8_cache=True),
    LayerNormShape("starcoder2-15b", 6144, 24576, 48, 4, 128, 49152, rotated=128, windows=(4096,)),
    LayerNormShape("falcon-7b", 4544, 18176, 71, 1, 64, 65024, activation="gelu", rotated=64),
    LayerNormShape("bloom-7b1", 4096, 16384, 32, 32, 128, 250880, has_slopes=True, has_float8_cache=True),
    LayerNormShape("bloom-176b", 14336, 57344, 112, 112, 128, 250880, has_slopes=True, shards=(8,)),
    LayerNormShape("mpt-7b", 4096, 16384, 32, 32, 128, 50432, activation="gelu", has_slopes=True),
    LayerNormShape("bart-large", 1024, 4096, 16, 16, 64, 50265, activation="gelu", has_encoder=True),
    ModelShape(
        *("flan-t5-xl", 2048, 5120, 32, 32, 64, 32128, "gelu_tanh"),
        rotated=0,
        has_encoder=True,
        has_float8_cache=True,
    ),
    ModelShape("flan-t5-xxl", 4096, 10240, 64, 64, 64, 32128, "gelu_tanh", rotated=0, has_encoder=True),
    ModelShape("flan-ul2", 4096, 16384, 16, 16, 256, 32128, rotated=0, has_encoder=True),
)


def find_variants(num_tokens: int = NUM_TOKENS) -> list[Variant]:
    """Return the launches of all models in steps of `num_tokens` tokens. Some launches are equal."""
    shared = find_begin_step(num_tokens), find_accept_drafts(num_tokens), find_group_rows(num_tokens)
    variants = [*shared, *find_code_variants(), *find_few_variants(num_tokens)]
    for model in MODELS:
        for size in model.shards:
            variants += find_model_variants(model.divided(size), num_tokens)
    return variants


def find_code_variants(dtypes: Sequence[torch.dtype] = DTYPES) -> Iterator[Variant]:
    """Yield the launches of products with codes, which are the same for all models. Products of each layout
    have a kernel for each number of rows that a program multiplies."""
    kernels, device = Implementations.choose(), torch.device("meta")
    for number, layout in enumerate(LAYOUTS):
        for dtype in dtypes:
            about = f"all models {str(dtype).removeprefix('torch.')} layout {number}"
            for in_features in (WIDE, NARROW):
                weight = draw_packed(layout, in_features, NUM_OUTPUTS).to(device)
                for num_rows in STAGES:
                    x = _empty(num_rows, in_features, dtype=dtype)
                    run = partial(kernels.multiply_codes, x, weight, None, dtype)
                    yield Variant("multiply_codes", f"{about}, {in_features}, {num_rows} rows", run)
            yield Variant("widen_codes", about, partial(kernels.widen_codes, weight, dtype))


def find_few_variants(num_tokens: int, dtypes: Sequence[torch.dtype] = DTYPES) -> Iterator[Variant]:
    """Yield the launches of products of few rows, which are the same for all models: in parts or not, and of
    the head."""
    kernels, num_rows = Implementations.choose(), min(num_tokens, MAX_ROWS)
    for dtype in dtypes:
        about = f"all models {str(dtype).removeprefix('torch.')}"
        x = _empty(num_rows, WIDE, dtype=dtype)
        for kind, num_outputs in (("parts", WIDE), ("whole", 8 * WIDE)):
            weight, bias = _empty(num_outputs, WIDE, dtype=dtype), _empty(num_outputs, dtype=dtype)
            for out_dtype in (dtype, torch.float32):
                label = f"{about} {kind} {'head' * (out_dtype != dtype)}".strip()
                yield Variant(
                    "multiply_few", label, partial(kernels.multiply_few, x, weight, None, out_dtype)
                )
            yield Variant(
                "multiply_few", f"{about} {kind} bias", partial(kernels.multiply_few, x, weight, bias, dtype)
            )
        parts = _floats(8, num_rows, WIDE)
        for has_bias, out_dtype in ((False, dtype), (True, dtype), (False, torch.float32)):
            label = f"{about} {'bias' * has_bias} {'head' * (out_dtype != dtype)}"
            run = partial(kernels.add_parts, parts, bias if has_bias else None, out_dtype)
            yield Variant("add_parts", " ".join(label.split()), run)


def find_check_variants() -> list[Variant]:
    """Return the launches of the self-check at startup."""
    triton_kernels, device = Implementations.choose(), torch.device("meta")
    return [
        Variant(name, f"check {dtype}", partial(each.run, getattr(triton_kernels, name)))
        for name, draw in INPUTS.items()
        for dtype in DTYPES
        for each in draw(device, dtype)
    ]


def find_model_variants(
    model: ModelShape, num_tokens: int, dtypes: Sequence[torch.dtype] = DTYPES
) -> Iterator[Variant]:
    """Yield the launches of one model with weights of these types."""
    kernels = Implementations.choose()

    def variant(kernel: str, run: Callable[[], object], about: str = "") -> Variant:
        return Variant(kernel, f"{model.name} {about}".strip(), run)

    yield variant("sample", lambda: _sample(kernels, model, num_tokens))
    yield variant("sample", lambda: _sample(kernels, model, num_tokens, has_details=True), "details")
    yield variant("describe", lambda: _describe(kernels, model, num_tokens))
    for dtype in dtypes:
        about = str(dtype).removeprefix("torch.")
        for has_delta in (False, True):
            run = _norm(kernels, model, num_tokens, dtype, has_delta)
            yield variant("norm", run, f"{about} {'delta' * has_delta}".strip())
        for num_parts in _count_parts(model):
            run = _norm(kernels, model, num_tokens, dtype, True, num_parts)
            yield variant("norm", run, f"{about} {num_parts} parts")
        yield variant("gate", _gate(kernels, model, num_tokens, dtype), about)
        for stored in (dtype, *(FLOAT8_TYPES if model.has_float8_cache else ())):
            for kernel, kind, run in _cache_launches(kernels, model, num_tokens, dtype, stored):
                of_cache = "" if stored == dtype else str(stored).removeprefix("torch.")
                yield variant(kernel, run, " ".join(filter(None, (about, kind, of_cache))))
        for layer, run in _low_rank_launches(kernels, model, num_tokens, dtype):
            yield variant("add_low_rank", run, f"{about} {layer}")
        for tile in (FEW_ROWS, MANY_ROWS) if model.experts is not None else ():
            yield variant(
                "mix_experts", _mix_experts(kernels, model, num_tokens, dtype, tile), f"{about} {tile}"
            )
        for kernel, run in _state_launches(kernels, model, num_tokens, dtype):
            yield variant(kernel, run, about)


def _low_rank_launches(
    kernels: Implementations, model: ModelShape, num_tokens: int, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the launches for each layer that adapters may change."""
    if not model.has_adapters:
        return
    q_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    size, ffn_size = model.hidden_size, model.ffn_size
    layers = {
        "qkv": (size, [q_size, kv_size, kv_size], dtype),
        "out": (q_size, [size], dtype),
        "up": (size, [ffn_size] * (1 + model.is_gated), dtype),
        "down": (ffn_size, [size], dtype),
        "head": (size, [model.vocab_size], torch.float32),
        "embed": (0, [size], torch.float32),
    }
    rows = RowTiles(_empty(num_tokens), _empty(num_tokens, 3)), _empty(num_tokens)
    for layer, (in_size, widths, out_dtype) in layers.items():
        bounds = {"layer": TermBounds(len(widths), gcd(MAX_ALIGNMENT, *widths))}
        deltas = AdapterSlots.allocate(bounds, 8, torch.device("meta")).at("layer")
        x = _empty(num_tokens, in_size, dtype=dtype) if in_size else _empty(num_tokens, dtype=torch.int64)
        x = x.float() if layer == "head" else x
        y = _empty(num_tokens, sum(widths), dtype=out_dtype)
        yield layer, partial(kernels.add_low_rank, y, x, deltas, *rows, MAX_RANK)


def _mix_experts(
    kernels: Implementations, model: ModelShape, num_tokens: int, dtype: torch.dtype, tile: int
) -> Callable[[], object]:
    assert model.experts is not None, "the model has experts"
    width, size = model.experts
    biases = (_floats(1), _floats(1)) if model.has_expert_biases else (None, None)
    up = _empty((1 + model.is_gated) * size, width, dtype=dtype)
    experts = [ExpertMatrices(up, biases[0], _empty(width, size, dtype=dtype), biases[1])] * 3
    table = ExpertTable.of(experts, Activation(model.activation, model.is_gated), 1.0, model.scales_input)
    chosen = _empty(num_tokens, model.num_active, dtype=torch.int64)
    return partial(
        kernels.mix_experts, _floats(num_tokens, width), _floats(*chosen.shape), chosen, table, tile
    )


def _state_launches(
    kernels: Implementations, model: ModelShape, num_tokens: int, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the launches of recurrent layers, in steps of as many sequences as tokens."""
    sizes = model.states
    if sizes is None:
        return
    draw, heads = Draw(torch.device("meta")), sizes.num_heads
    states = StateCache(StateShape(2, sizes, STATE_CHUNK), 9, torch.device("meta"))
    spans = Spans(_empty(num_tokens), _empty(num_tokens + 1), _empty(num_tokens))
    memory = StateMemory(states.windows(1), states.sums(1), states.pending(1))
    rows = _empty(num_tokens, sizes.width + sizes.num_channels + heads * bool(model.mamba), dtype=dtype)
    channels, gates = _floats(num_tokens, sizes.num_channels), _floats(num_tokens, 2 * heads)
    weights = _floats(sizes.kernel_size, sizes.num_channels), _floats(sizes.num_channels)
    yield "convolve", lambda: kernels.convolve(rows, sizes.width, *weights, memory.windows, spans)
    if model.mamba:
        mamba, inputs = draw_mamba(draw, sizes), HeadInputs(rows, (rows.shape[1] - heads,), heads)
        yield "scan_mamba", lambda: kernels.scan_mamba(rows, channels, mamba, memory, spans)
    else:
        delta, inputs = draw_delta(draw, sizes), HeadInputs(gates, (heads, 0), heads)
        delta = replace(delta, first_head=0, total_heads=heads)
        yield "scan_delta", lambda: kernels.scan_delta(gates, channels, delta, memory, spans)
    yield "keep_inputs", lambda: kernels.keep_inputs(rows, sizes.width, channels, inputs, memory, spans)


def _empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _floats(*shape: int) -> Tensor:
    return _empty(*shape, dtype=torch.float32)


def _scorings(model: ModelShape) -> Iterator[tuple[str, Scoring]]:
    scale = model.head_dim**-0.5
    slopes, sinks = (
        _floats(model.num_heads) if has_them else None for has_them in (model.has_slopes, model.has_sinks)
    )
    for window in model.windows:
        bias = _floats(model.num_heads, 2 * REACH + 1) if model.has_encoder else None
        kind = "window" if window else "self"
        bent = Scoring(scale, soft_cap=model.soft_cap, slopes=slopes, bias=bias, sinks=sinks)
        yield kind, replace(bent, window=window)
    if model.chunk:
        yield "chunk", Scoring(scale, chunk=model.chunk)
    if model.has_encoder:
        yield "encoder", Scoring(scale, causal=False, bias=bias)
        yield "cross", Scoring(scale, causal=False)


def _rows(vocab_size: int) -> RowState:
    num_rows = 9
    return RowState(
        words=_empty(num_rows, len(Word)),
        block_tables=_empty(num_rows, MAX_BLOCKS),
        cross_tables=_empty(num_rows, MAX_BLOCKS),
        stop_ids=_empty(num_rows, MAX_STOP_IDS),
        bias_token_ids=_empty(num_rows, MAX_BIASES),
        biases=_floats(num_rows, MAX_BIASES),
        token_counts=_empty(num_rows, vocab_size, dtype=torch.int16),
        masks=_empty(num_rows, -(-vocab_size // 32)),
        greens=_empty(num_rows, -(-vocab_size // 32)),
        dummy_slot=NUM_BLOCKS * BLOCK_SIZE,
    )


def find_begin_step(num_tokens: int) -> Variant:
    """Return the launch of begin_step, which is the same for all models."""
    kernels, staged, rows = Implementations.choose(), _stage(num_tokens), _rows(vocab_size=32)
    out = StepTensors.empty(num_tokens, num_tokens, num_tokens, torch.device("meta"))
    return Variant("begin_step", "all models", lambda: kernels.begin_step(staged, rows, out))


def find_accept_drafts(num_tokens: int) -> Variant:
    """Return the launch of accept_drafts, which is the same for all models."""
    kernels, staged, rows = Implementations.choose(), _stage(num_tokens), _rows(vocab_size=32)
    answers, next_rows = _empty(num_tokens, 2), _empty(num_tokens)
    run = partial(kernels.accept_drafts, staged, rows, answers, next_rows)
    return Variant("accept_drafts", "all models", run)


def _stage(num_tokens: int) -> StagedStep:
    return StagedStep(
        seq_rows=_empty(num_tokens),
        seq_ends=_empty(num_tokens),
        token_rows=_empty(num_tokens),
        token_ids=_empty(num_tokens),
        positions=_empty(num_tokens),
        slots=_empty(num_tokens),
        new_blocks=_empty(num_tokens, 3),
        tiles=_empty(0, 5),
        cross_tiles=_empty(0, 5),
        sampled_rows=_empty(num_tokens),
        sampled_x=_empty(num_tokens),
    )


def find_group_rows(num_tokens: int) -> Variant:
    """Return the launch of group_rows for adapters, which is the same for all models."""
    kernels = Implementations.choose()
    return Variant("group_rows", "all models", lambda: kernels.group_rows(_empty(num_tokens), 9, TILE))


def _sample(kernels: Implementations, model: ModelShape, num_rows: int, has_details: bool = False) -> None:
    logits, rows = _floats(num_rows, model.vocab_size), _rows(model.vocab_size)
    questions = DetailQuestions.empty(num_rows, model.vocab_size, logits.device) if has_details else None
    kernels.sample(logits, rows, _empty(num_rows), _empty(num_rows, 2), questions)


def _describe(kernels: Implementations, model: ModelShape, num_tokens: int) -> None:
    device = torch.device("meta")
    questions = DetailQuestions.empty(num_tokens, model.vocab_size, device)
    kernels.describe(questions, DeviceDetails.empty(num_tokens, MAX_TOPS, device))


def _norm(
    kernels: Implementations,
    model: ModelShape,
    num_tokens: int,
    dtype: torch.dtype,
    has_delta: bool,
    num_parts: int = 0,
) -> Callable[[], object]:
    size = model.hidden_size
    delta = _empty(num_tokens, size, dtype=dtype) if has_delta else None
    if num_parts:
        delta = _floats(num_parts, num_tokens, size)
    bias = _floats(size) if model.has_norm_bias else None
    x, weight = _floats(num_tokens, size), _floats(size)
    of_branch = torch.float32 if dtype == torch.float16 else dtype
    return lambda: kernels.norm(x, delta, weight, bias, 1e-5, model.is_centred, dtype, of_branch)


def _count_parts(model: ModelShape) -> set[int]:
    """Return the numbers of parts of a layer's outputs, which norms add."""
    widths = model.num_heads * model.head_dim, model.ffn_size
    return {count_parts(model.hidden_size, width) for width in widths if width}


def _gate(
    kernels: Implementations, model: ModelShape, num_tokens: int, dtype: torch.dtype
) -> Callable[[], object]:
    x = _empty(num_tokens, model.ffn_size * (1 + model.is_gated), dtype=dtype)
    return lambda: kernels.gate(x, model.activation, model.is_gated)


def _cache_launches(
    kernels: Implementations, model: ModelShape, num_tokens: int, dtype: torch.dtype, stored: torch.dtype
) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """Yield the launches that write or read a cache of the type `stored`, each with its kernel and the kind
    of attention."""
    yield "turn_and_keep", "", _turn_and_keep(kernels, model, num_tokens, dtype, stored)
    for kind, scoring in _scorings(model):
        if kind != "encoder":
            run = _attend_segments(kernels, model, num_tokens, dtype, stored, scoring)
            yield "attend_segments", kind, run
        yield "attend_tiles", kind, _attend_tiles(kernels, model, num_tokens, dtype, stored, scoring)


def _pages(model: ModelShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = NUM_BLOCKS + 1, model.num_kv_heads, BLOCK_SIZE, model.head_dim
    return _empty(*shape, dtype=dtype), _empty(*shape, dtype=dtype)


def _turn_and_keep(
    kernels: Implementations, model: ModelShape, num_tokens: int, dtype: torch.dtype, stored: torch.dtype
) -> Callable[[], object]:
    rotated = model.head_dim if model.rotated is None else model.rotated
    angles = _floats(2, num_tokens, rotated // 2) if rotated else None
    norm = None
    if model.has_head_norm:
        norm = HeadNorm(_floats(model.head_dim), _floats(model.head_dim), 1e-6)
    heads = Heads(model.num_heads, model.num_kv_heads, norm)
    width = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    qkv, slots = _empty(num_tokens, width, dtype=dtype), _empty(num_tokens, dtype=torch.int64)
    return lambda: kernels.turn_and_keep(qkv, heads, angles, *_pages(model, stored), slots)


def _attend_segments(
    kernels: Implementations,
    model: ModelShape,
    num_seqs: int,
    dtype: torch.dtype,
    stored: torch.dtype,
    scoring: Scoring,
) -> Callable[[], object]:
    q = _empty(num_seqs, model.num_heads, model.head_dim, dtype=dtype)
    pages = *_pages(model, stored), _empty(9, MAX_BLOCKS)
    segments = Segments(_empty(num_seqs), _empty(num_seqs), _empty(num_seqs + 1))
    return lambda: kernels.attend_segments(q, *pages, segments, MAX_SEQ_LEN, scoring)


def _attend_tiles(
    kernels: Implementations,
    model: ModelShape,
    num_tokens: int,
    dtype: torch.dtype,
    stored: torch.dtype,
    scoring: Scoring,
) -> Callable[[], object]:
    q = _empty(num_tokens, model.num_heads, model.head_dim, dtype=dtype)
    pages = *_pages(model, stored), _empty(9, MAX_BLOCKS)
    num_tiles = -(-num_tokens // tile_tokens(model.num_heads // model.num_kv_heads))
    tiles, out = _empty(num_tiles, 5), torch.empty_like(q)
    return lambda: kernels.attend_tiles(q, *pages, tiles, MAX_SEQ_LEN, scoring, out)
