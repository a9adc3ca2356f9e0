"""Declares the options of a model and of the soft prompts and LoRA adapters that it is served with."""

from dataclasses import dataclass

from tgis.config.option import Group, in_group, option

DTYPES = ("float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
ARITHMETICS = ("float32", "bfloat16")
ACTIVATIONS = ("int8",)
# Type of the KV cache for each accepted name; None is that of the weights. Some are other servers' names.
CACHE_TYPES = {
    "auto": None,
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "fp8": "fp8_e4m3",
    "fp8_e4m3fn": "fp8_e4m3",
}
# First schemes, then names of formats; those that begin with bitsandbytes and fp8 are both.
QUANTIZATIONS = (
    *("int8", "int4", "eetq", "bitsandbytes", "bitsandbytes-nf4", "bitsandbytes-fp4", "fp8"),
    *("gptq", "marlin", "awq", "compressed-tensors"),
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
        "Directory of this user's caches; compiled kernels are kept in tgis below it if the installed "
        "package is read-only or another user's; unset: .cache in the home directory.",
        None,
        env="XDG_CACHE_HOME",
        group=Group.LIFECYCLE,
    )
    dtype: str | None = option(
        "Type the weights are held in; unset: the checkpoint's own, but bfloat16 for float32 on GPUs.",
        None,
        choices=DTYPES,
    )
    device: str = option(
        "What shards compute on; auto: GPUs where torch can use them, else the CPU.",
        "auto",
        env="TGIS_DEVICE",
        choices=DEVICES,
    )
    quantize: str | None = option(
        "Round the weights of linear layers when they are read, in the service's own engine. int8 computes "
        "in 8 bits, on the CPU, and rounds activations too; int4, eetq, bitsandbytes, bitsandbytes-nf4, "
        "bitsandbytes-fp4 and fp8 round weights only, int4 those of head and embedding too. "
        "CPUs keep these weights as codes, but those of fp8 as --dtype, as GPUs keep "
        "all of them. A quantized checkpoint needs no value: it is served by its own "
        "settings, which gptq, marlin, awq, compressed-tensors, fp8 and bitsandbytes must match.",
        None,
        choices=QUANTIZATIONS,
        advice=OTHER_QUANTIZATIONS,
    )
    rope_scaling: str | None = option(
        "Scaling of rotary positions, for sequences longer than the model's own length, of a model whose "
        "configuration has none; linear divides all positions by --rope-factor, dynamic slows only those "
        "past the model's length.",
        None,
        choices=ROPE_SCALINGS,
        advice="Other scalings are read from the model's own config.json.",
    )
    rope_factor: float | None = option(
        "Factor of --rope-scaling, which is linear if only the factor is given; unset: 1. The longest "
        "sequence remains --max-sequence-length.",
        None,
        minimum=1,
    )
    activations: str | None = option(
        "What CPUs round the inputs of linear layers to if their weights are integer codes of at most 8 "
        "bits. int8 computes in 8 bits where the processor has AVX2 or VNNI, and rounds the head's weights "
        "too; unset: inputs are not rounded. --quantize int8 rounds them always.",
        None,
        choices=ACTIVATIONS,
    )
    block_size: int = option("Tokens per cache block.", 16, minimum=1, group=Group.MEMORY)
    kv_cache_tokens: int | None = option(
        "Most tokens the cache may hold; memory and the largest batch limit it too.",
        None,
        minimum=1,
        group=Group.MEMORY,
        is_common=True,
    )
    kv_cache_memory_fraction: float | None = option(
        "Share of the memory that weights, the largest step and adapters leave which the cache may take; "
        "unset: a quarter of a machine's memory, all of a GPU's within --cuda-memory-fraction.",
        None,
        minimum=0.01,
        maximum=1,
        group=Group.MEMORY,
    )
    kv_cache_dtype: str = option(
        "Type of keys and values in the cache; auto: that of --dtype, or of --cpu-arithmetic bfloat16. "
        "fp8_e4m3 and fp8_e5m2 take half the memory of 16 bits and are faster in long sequences, on CPUs "
        "only. A checkpoint's scales of keys and values are used if it has them. fp8 and fp8_e4m3fn are "
        "other servers' names of fp8_e4m3.",
        "auto",
        choices=tuple(CACHE_TYPES),
        advice="A cache of 16 or 32 bits has the type of --dtype.",
        group=Group.MEMORY,
    )
    cpu_threads: int | None = option(
        "Threads each shard computes with; unset: the machine's cores, shared by the shards.",
        None,
        minimum=1,
        maximum=1024,  # OpenMP ends the process when the system starts no more, without a reason
        group=Group.MEMORY,
    )
    cpu_arithmetic: str = option(
        "Arithmetic of matrix products and attention on CPUs, in the service's own engine. bfloat16 rounds "
        "what they multiply to bfloat16 and adds in float32: about twice as fast for several tokens at once "
        "on AMD's processors with AVX512_BF16 and Intel's with AMX, slower on others. Keys and values are "
        "then kept as bfloat16. Products of codes stay as they are, and so does attention to keys and values "
        "of 8 bits.",
        "float32",
        choices=ARITHMETICS,
        group=Group.MEMORY,
    )
    cpu_amx: str = option(
        "Use of AMX on CPUs, for --cpu-arithmetic bfloat16 and for products of int8 codes: auto uses it "
        "where the processor has it and its results prove right when a shard starts.",
        "auto",
        choices=("auto", "off"),
        group=Group.MEMORY,
    )
    cuda_graphs: str | None = option(
        "On GPUs, numbers of sequences whose decode steps are captured as CUDA graphs, separated by commas. "
        "A step takes the graph of the next larger number, if there is one. 0: no graphs; unset: 1, 2, 4, 8, "
        "12, 16, 24, 32 and so on to --max-batch-size.",
        None,
        group=Group.MEMORY,
    )
    cuda_memory_fraction: float | None = option(
        "Share of a GPU's memory that the shard on it may use; unset: all of it.",
        None,
        minimum=0.01,
        maximum=1,
        group=Group.MEMORY,
    )
    deployment_framework: str | None = option(
        "Engine: tgis_native is the service's own and serves the families it knows; hf_transformers runs "
        "transformers' code with the service's cache and attention, more slowly; hf_optimum_ort runs a model "
        "in ONNX form; unset: the service's own where it knows the family, otherwise transformers' code.",
        None,
        choices=FRAMEWORKS,
    )
    trust_remote_code: bool = option(
        "Run Python code that comes with a checkpoint, with all the rights of this service.", False
    )


@in_group(Group.ADAPTERS)
@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    prefix_store_path: str | None = option(
        "Directory of tuned soft prompts, and of LoRA adapters, by their ids; unset: none.", None
    )
    prompt_cache_size_mb: int = option(
        "MiB of soft prompts that each shard may keep loaded; the least recently used are evicted.",
        512,
        minimum=1,
    )
    max_prompt_prefix_length: int | None = option(
        "Most virtual tokens of a soft prompt; unset: half of the longest sequence.", None, minimum=1
    )
    adapter_cache: str | None = option(
        "Directory of LoRA adapters by their ids, searched before --prefix-store-path.", None
    )
    adapter_cache_size_mb: int = option(
        "MiB of LoRA adapters that each shard may keep loaded; the least recently used are evicted.",
        1024,
        minimum=1,
    )
    lora_adapters: str | None = option(
        "LoRA adapters to load at the start and keep loaded: NAME=DIRECTORY, or ids in the hub cache, "
        "separated by commas.",
        None,
    )
