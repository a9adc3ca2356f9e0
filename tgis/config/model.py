"""Declares the options of a model and of the soft prompts and LoRA adapters that it is served with."""

from dataclasses import dataclass

from tgis.config.option import Group, in_group, option

DTYPES = ("float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
ARITHMETICS = ("auto", "float32", "bfloat16")
ACTIVATIONS = ("int8",)
# Type of the KV cache for each accepted name; None is the type of the weights. Some names are other servers'.
CACHE_TYPES = {
    "auto": None,
    "int8": "int8",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "fp8": "fp8_e4m3",
    "fp8_e4m3fn": "fp8_e4m3",
}
# Schemes, then names of formats. The names that begin with bitsandbytes, and fp8, are both.
QUANTIZATIONS = (
    *("int8", "int4", "eetq", "bitsandbytes", "bitsandbytes-nf4", "bitsandbytes-fp4", "fp8"),
    *("gptq", "marlin", "awq", "compressed-tensors", "mxfp4"),
)
OTHER_QUANTIZATIONS = (
    "Serve a GPTQ, AWQ, compressed-tensors, fp8 or bitsandbytes checkpoint of the model, or the unquantized "
    "checkpoint with --quantize int8."
)
# Engine for each accepted name. There are three engines: hf_transformers, tgis_native and hf_optimum_ort.
# None means tgis_native or hf_transformers, whichever serves the model.
ENGINES = {
    "hf_transformers": "hf_transformers",
    "hf_accelerate": "hf_transformers",
    "tgis_native": "tgis_native",
    "hf_custom_tp": "tgis_native",
    "hf_optimum_ort": "hf_optimum_ort",
    "hf_optimum_bt": None,
}
ROPE_SCALINGS = ("linear", "dynamic")
ENGINES_NOT_SERVED = {  # with the reason
    "ibm_fms": "this service does not use IBM FMS",
    "ds_inference": "this service does not use DeepSpeed, and shards models without it",
}
FRAMEWORKS = (*ENGINES, *ENGINES_NOT_SERVED)


@in_group(Group.MODEL)
@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    cache_home: str | None = option(
        "Directory of this user's caches; compiled kernels are cached in its folder tgis if the installed "
        "package is read-only or belongs to another user; unset: .cache in the home directory.",
        None,
        env="XDG_CACHE_HOME",
        group=Group.LIFECYCLE,
    )
    dtype: str | None = option(
        "Data type of the weights in memory; unset: the checkpoint's own type, except that GPUs hold float32 "
        "weights as bfloat16.",
        None,
        choices=DTYPES,
    )
    device: str = option(
        "Device of the shards; auto: GPUs if torch can use them and they can run the model, else the CPU.",
        "auto",
        env="TGIS_DEVICE",
        choices=DEVICES,
    )
    quantize: str | None = option(
        "Quantize the weights of linear layers while loading, in the service's own engine. int8 also "
        "quantizes the head, and on CPUs activations, and computes in 8 bits there; int4, eetq, "
        "bitsandbytes, bitsandbytes-nf4, bitsandbytes-fp4 and fp8 quantize only weights, int4 also those "
        "of head and embedding. Quantized weights are kept as codes, except for those of fp8 on CPUs, "
        "which are kept as --dtype. A quantized checkpoint needs no value; if gptq, marlin, awq, "
        "compressed-tensors, fp8, bitsandbytes or mxfp4 is given for one, it must match the checkpoint.",
        None,
        choices=QUANTIZATIONS,
        advice=OTHER_QUANTIZATIONS,
    )
    no_quantize_check: bool = option(
        "Do not compare a model that --quantize rounds with its unrounded weights, on a short text, when it "
        "starts. The comparison takes about 3 s for a billion weights and logs a warning if the model loses "
        "more than is usual; it is left out if the checkpoint does not fit free memory. Activations that are "
        "rounded to 8 bits are smoothed by the same text, and int4 weighs columns by it, with or without "
        "the comparison.",
        False,
    )
    rope_scaling: str | None = option(
        "Scaling of rotary positions (RoPE) for sequences longer than the model's own length, if the model's "
        "configuration has none; linear divides all positions by --rope-factor, dynamic scales only "
        "sequences beyond the model's length.",
        None,
        choices=ROPE_SCALINGS,
        advice="Other scalings are read from the model's own config.json.",
    )
    rope_factor: float | None = option(
        "Factor of --rope-scaling, which is linear if only the factor is given; unset: 1. It does not change "
        "--max-sequence-length.",
        None,
        minimum=1,
    )
    activations: str | None = option(
        "Type to which CPUs quantize the inputs of linear layers whose weights are integer codes of at most "
        "8 bits. int8 computes in 8 bits if the processor has AVX2, VNNI or ARM's dot product, and quantizes "
        "the head's weights too; unset: inputs are not quantized. With --quantize int8 they always are.",
        None,
        choices=ACTIVATIONS,
    )
    block_size: int = option("Tokens per cache block.", 16, minimum=1, group=Group.MEMORY)
    kv_cache_tokens: int | None = option(
        "Maximum number of tokens in the KV cache; unset: limited only by memory and by what the largest "
        "batch can use, which also apply if it is set.",
        None,
        minimum=1,
        group=Group.MEMORY,
        is_common=True,
    )
    kv_cache_memory_fraction: float | None = option(
        "Maximum share, for the KV cache, of the memory that remains after weights, the largest step and "
        "adapters; unset: a quarter on CPUs, all of it within --cuda-memory-fraction on GPUs.",
        None,
        minimum=0.01,
        maximum=1,
        group=Group.MEMORY,
    )
    kv_cache_dtype: str = option(
        "Data type of keys and values in the KV cache; auto: --dtype, or bfloat16 with --cpu-arithmetic "
        "bfloat16. int8, fp8_e4m3 and fp8_e5m2 take half the memory of 16 bits and are faster for long "
        "sequences. int8, on CPUs only, is the most precise: it has a scale for each token and head. The "
        "others use the checkpoint's scales of keys and values if it has any; fp8 and fp8_e4m3fn are other "
        "servers' names for fp8_e4m3.",
        "auto",
        choices=tuple(CACHE_TYPES),
        advice="For a cache of 16 or 32 bits, set --dtype.",
        group=Group.MEMORY,
    )
    cpu_threads: int | None = option(
        "Number of compute threads of each shard; unset: the machine's cores divided by the shards, or the "
        "physical cores of a pinned shard.",
        None,
        minimum=1,
        maximum=1024,  # OpenMP aborts the process without a message if it cannot start a thread
        group=Group.MEMORY,
    )
    cpu_pinning: str = option(
        "Pinning of shards to CPUs; auto: if there are several shards and the CPUs belong to several NUMA "
        "nodes, each shard runs on the CPUs of one node, and its weights and cache are in that node's "
        "memory. If there are more nodes than shards, each has adjacent nodes.",
        "auto",
        choices=("auto", "off"),
        group=Group.MEMORY,
    )
    cpu_arithmetic: str = option(
        "Arithmetic of matrix products and attention on CPUs, in the service's own engine. bfloat16 rounds "
        "the operands to bfloat16 and accumulates in float32: about twice as fast for several tokens at once "
        "on AMD processors with AVX512_BF16 and Intel processors with AMX, slower on others. It also keeps "
        "keys and values as bfloat16. Products of quantized weights change only with AMX, and attention to "
        "8-bit keys and values does not change. auto: bfloat16 on these processors, unless the weights are "
        "float32 and not quantized.",
        "auto",
        choices=ARITHMETICS,
        group=Group.MEMORY,
    )
    cpu_amx: str = option(
        "Use of AMX on CPUs, for --cpu-arithmetic bfloat16, which includes products of quantized weights, "
        "and for products of int8 codes; auto: use it if the processor has it and its results pass a check "
        "when a shard starts. off: --cpu-arithmetic auto selects float32 on Intel processors, so that keys "
        "and values of GGUF files take twice the memory.",
        "auto",
        choices=("auto", "off"),
        group=Group.MEMORY,
    )
    cuda_graphs: str | None = option(
        "On GPUs, batch sizes whose decode steps are captured as CUDA graphs, separated by commas. A step "
        "uses the graph of the next larger size, if there is one. 0: no graphs; unset: 1, 2, 4, 8, 12, 16, "
        "24, 32 and so on up to --max-batch-size.",
        None,
        group=Group.MEMORY,
    )
    cuda_memory_fraction: float | None = option(
        "Maximum share of a GPU's memory that its shard may use; unset: all of it.",
        None,
        minimum=0.01,
        maximum=1,
        group=Group.MEMORY,
    )
    deployment_framework: str | None = option(
        "Engine that runs the model: tgis_native is the service's own, for the model families that it "
        "implements; hf_transformers runs the model code of transformers with the service's cache and "
        "attention, more slowly; hf_optimum_ort runs an ONNX model; unset: tgis_native if it implements the "
        "family, else hf_transformers.",
        None,
        choices=FRAMEWORKS,
    )
    speculator: str | None = option(
        "Speculator, which drafts the next tokens (an MLP speculator, Medusa heads, an EAGLE or EAGLE-3 "
        "head, or a smaller model with the same tokenizer): a directory, or the id of a model in the local "
        "hub cache; mtp: the head for multi-token prediction in the model's own checkpoint. Outputs do not "
        "change. --speculate limits the drafts.",
        None,
    )
    trust_remote_code: bool = option(
        "Run Python code that a checkpoint contains, with all permissions of this service.", False
    )


@in_group(Group.ADAPTERS)
@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    prefix_store_path: str | None = option(
        "Directory of tuned soft prompts and LoRA adapters, each in a folder named by its id; unset: none.",
        None,
    )
    prompt_cache_size_mb: int = option(
        "Maximum size, in MiB, of the soft prompts loaded in each shard; the least recently used are "
        "evicted.",
        512,
        minimum=1,
    )
    max_prompt_prefix_length: int | None = option(
        "Maximum number of virtual tokens of a soft prompt; unset: half of --max-sequence-length.",
        None,
        minimum=1,
    )
    adapter_cache: str | None = option(
        "Directory of LoRA adapters, each in a folder named by its id; it is searched before "
        "--prefix-store-path; unset: none.",
        None,
    )
    adapter_cache_size_mb: int = option(
        "Maximum size, in MiB, of the LoRA adapters loaded in each shard; the least recently used are "
        "evicted.",
        1024,
        minimum=1,
    )
    lora_adapters: str | None = option(
        "LoRA adapters to load at start-up and keep loaded: NAME=DIRECTORY, or ids in the hub cache, "
        "separated by commas.",
        None,
    )
