"""Lists the flags and variables of TGIS's three programs that are not options of this service."""

import math

from tgis.config.aliases.alias import OWN_KERNELS, Alias

ALL = ("launcher", "serve")
ROUTER = ("launcher", "router")
TGIS_BLOCK_SIZE = 16  # tokens

COUNTED = "the cache is counted in blocks, not estimated"
NOT_COMPILED = "the model's code is not compiled"
NO_TREES = "--speculate limits the drafts of a sequence, one after the other, and free rows those of a batch"
OF_SHARDS = "it is an option of the shards, which load the soft prompts"
ONE_KERNEL = "every weight format uses the service's own kernels"
NO_ONNX = "ONNX models are served unchanged: convert-to-onnx has options for this"


def _out_of_range(text: str, name: str, minimum: float, maximum: float, refusal: str) -> str | None:
    """Return an error message if `text` is not a number from `minimum` to `maximum`, else None."""
    try:
        value = float(text)
    except ValueError:
        return f"{name} must be a number, not {text!r}"
    return None if math.isfinite(value) and minimum <= value <= maximum else refusal.format(value=value)


def _padding(text: str) -> str | None:
    refusal = "max_prefill_padding ({value}) must be a percentage in the range [0.0, 1.0]"
    return _out_of_range(text, "max_prefill_padding", 0.0, 1.0, refusal)


def _memory_fraction(text: str) -> str | None:
    refusal = "cuda_process_memory_fraction must be in range 0 < x <= 1"
    return _out_of_range(text, "cuda_process_memory_fraction", math.ulp(0.0), 1.0, refusal)


def _estimate(text: str) -> str | None:
    is_known = text in ("auto", "manual", "off")
    return None if is_known else "valid options for ESTIMATE_MEMORY are auto, manual, and off"


def _blocks_to_tokens(text: str) -> str:
    return str(int(text) * TGIS_BLOCK_SIZE)


def _variables(why: str, *names: str) -> tuple[Alias, ...]:
    """Return variables of TGIS's shards that have no flag and no effect."""
    return tuple(Alias(name.lower(), why=why, commands=ALL, flag=False) for name in names)


FLAGS = (
    Alias("max_prefill_padding", why="nothing is padded", commands=ROUTER, refusal_of=_padding),
    Alias("max_waiting_tokens", why="new requests join at every step", commands=ROUTER),
    Alias("batch_safety_margin", why=COUNTED, commands=ALL),
    Alias(
        "cuda_process_memory_fraction",
        means="cuda_memory_fraction",
        short="-c",
        commands=ALL,
        refusal_of=_memory_fraction,
    ),
    Alias("prefix_store_path", why=OF_SHARDS, commands=("router",)),
    Alias("prompt_cache_size_mb", why=OF_SHARDS, commands=("router",)),
    Alias("max_prompt_prefix_length", why=OF_SHARDS, commands=("router",)),
    Alias(
        "master_shard_uds_path",
        means="shard_uds_path",
        why="without the `-0` at its end",
        commands=("router",),
        convert=lambda text: text.removesuffix("-0"),
    ),
    Alias("max_new_tokens", why="the router enforces this limit", commands=("serve",), variable=False),
)
VARIABLES = (
    Alias(
        "kv_cache_manager_num_gpu_blocks",
        means="kv_cache_tokens",
        why="a block is 16 tokens",
        commands=ALL,
        flag=False,
        convert=_blocks_to_tokens,
    ),
    *_variables(
        "batches are limited by cache blocks, not by weights", "MAX_BATCH_WEIGHT", "MAX_PREFILL_WEIGHT"
    ),
    *_variables(
        OWN_KERNELS, "FLASH_ATTENTION", "PAGED_ATTENTION", "TRANSFORMERS_ATTN_IMPL", "DISABLE_CUSTOM_KERNELS"
    ),
    *_variables(NOT_COMPILED, "PT2_COMPILE"),
    *_variables("nothing is padded", "CUDA_PAD_TO_MULT_OF_8"),
    *_variables("there is nothing to compact", "COMPACT_BEFORE_PREFILL"),
    Alias("estimate_memory", why=COUNTED, commands=ALL, flag=False, refusal_of=_estimate),
    *_variables(
        COUNTED,
        "ESTIMATE_MEMORY_BATCH_SIZE",
        "ESTIMATE_MEMORY_MIN_SAMPLES",
        "ESTIMATE_MEMORY_START_SEQ_LEN",
        "ESTIMATE_MEMORY_STOP_SEQ_LEN",
        "ESTIMATE_MEMORY_FIT_THRESHOLD",
        "ESTIMATE_MEMORY_NEW_TOKENS",
        "ESTIMATE_MEMORY_NEW_TOKEN_SAMPLES",
    ),
    *_variables("memory use is logged once, when the model is loaded", "LOG_GPU_USAGE_INTERVAL"),
    *_variables("logits are always processed in float32", "FP32_LOGITS_PROCESS"),
    *_variables("the computation is always exact", "BLOOM_SLOW_BUT_EXACT"),
    *_variables(ONE_KERNEL, "DISABLE_EXLLAMA", "EXLLAMA_VERSION", "GPTQ_CUDA_TYPE"),
    *_variables(NO_ONNX, "MERGE_ONNX_GRAPHS", "OPTIMIZE_ONNX_MODEL"),
    Alias("speculator_name", means="speculator", flag=False),
    Alias("speculator_name", why="set --speculator", commands=("serve",), flag=False),
    *_variables("the main revision in the hub cache is used, or a directory", "SPECULATOR_REVISION"),
    *_variables(
        NO_TREES,
        "SPECULATOR_N_CANDIDATES",
        "SPECULATOR_TOP_K_TOKENS_PER_HEAD",
        "SPECULATOR_MAX_BATCH_SIZE",
    ),
    *_variables("there is no fake process group", "DEBUG"),
)
TGIS_NAMES = FLAGS + VARIABLES

# Variables that the launcher passes on unread, with their readers.
PASSED_ON = {
    "PYTORCH_CUDA_ALLOC_CONF": "torch",
    "NCCL_ASYNC_ERROR_HANDLING": "torch",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "torch",
    "SAFETENSORS_FAST_GPU": "safetensors",
    "OTEL_SERVICE_NAME": "the router, if the launcher sets no service name",
}
