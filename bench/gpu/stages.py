"""Lists the stages of a run, the most valuable per second first; 480 seconds in total. Nothing here imports
torch."""

from collections.abc import Iterator

from bench.gpu.course.case import Case, Stage

BUDGET_S = 480.0
AGAIN_BUDGET_S = 240.0

TORCH = ("torch",)
LIBRARIES = (
    *TORCH,
    "triton",
    "torch._dynamo",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
    "peft",
    "tgis.shard.startup.platforms.cuda",
    "tgis.shard.startup.load",
    "tests.support.shard.family_cases.all",
    "bench.gpu.cases.features",
)

KERNELS = (
    *("begin_step", "norm", "turn_and_keep", "attend_segments", "attend_tiles", "gate", "sample", "describe"),
    *("accept_drafts", "convolve", "scan_mamba", "scan_delta", "keep_inputs"),
    *("group_rows", "add_low_rank", "mix_experts"),
    *("multiply_few", "add_parts"),
    *("multiply_codes", "widen_codes"),
)
# Kernels that read or write a cache.
CACHED = ("turn_and_keep", "attend_segments", "attend_tiles")
# Names in tests.support.shard.family_cases: one case of each family, then all others.
FAMILIES = tuple(
    "llama_grouped_queries mistral qwen2 qwen3 granite granite_swa gemma gemma2 gemma3 phi3 olmo2 olmo3 "
    "smollm3 ministral3 mistral3 mixtral qwen2_moe qwen3_moe granitemoe granitemoe_swa granitemoeshared "
    "granitemoehybrid nemotron_h falcon_h1 mamba2 qwen3_next qwen3_5_text qwen3_5_moe_text "
    "glm4_moe llama4_text gpt_oss starcoder2 gpt_neox gpt2 gpt_bigcode "
    "bloom falcon_7b mpt "
    "opt t5 bart".split()
)
# gemma_gelu is left out: transformers before 5.23 computes the wrong activation, which its configuration
# names by mistake.
VARIANTS = tuple(
    "llama_tied llama_multi_head llama_shared_kv_head llama_wide_heads llama_biases llama_llama3_rope "
    "llama_linear_rope llama_yarn_rope mistral_window mistral_tied_shared_kv_head ministral "
    "qwen2_last_layer_window qwen2_first_layer_window qwen2_yarn qwen3_biases_window qwen3_tied_yarn "
    "granite_biases granite_shared_kv_head granite_swa_untied_shared_kv_head gemma2_uncapped "
    "gemma2_untied_biases_gelu gpt_oss_shared_kv_head "
    "gemma3_capped_shared_kv_head gemma3_multimodal phi3_tied_short phi3_short_and_long olmo2_tied_biases "
    "olmo2_multi_head_yarn mixtral_tied_window qwen3_moe_some_dense qwen3_moe_biases_window "
    "granitemoe_biases gpt_neox_sequential gpt_neox_full_rotary gpt_neox_no_bias gpt2_wide gpt2_unscaled "
    "gpt_bigcode_multi_head bloom_six_heads falcon_40b falcon_11b falcon_rw falcon_sequential falcon_alibi "
    "mpt_six_heads mpt_clipped opt_350m opt_no_final_norm opt_no_bias flan_t5 ul2 mt5 umt5 bart_scaled "
    "mbart olmo3_tied_yarn smollm3_untied_window ministral3_tied_window mistral3_ministral3_tied "
    "qwen2_moe_some_dense_window granitemoeshared_none_shared granitemoe_swa_shared "
    "glm4_moe_biases_one_group llama4_text_biases_untuned llama4_multimodal "
    "granitemoehybrid_attention_only granitemoehybrid_experts_rope_biases granitemoehybrid_mamba_only "
    "nemotron_h_experts nemotron_h_latent_experts_biases falcon_h1_norm_before_gate "
    "falcon_h1_gate_before_norm_biases mamba2_tied_biases qwen3_next_some_dense_biases "
    "qwen3_5_multimodal_tied qwen3_5_moe_multimodal".split()
)
# Names in bench.gpu.cases.features.
KINDS = ("details", "watermark", "guided", "top_p", "top_k", "typical_p", "sampled", "penalties")
REHEARSED_KINDS = ("details", "watermark", "guided", "top_k")
# Names in tests.support.shard.foreign_cases: models that transformers' code runs.
FOREIGN = ("phi", "gemma4_text")
# Names in bench.gpu.cases.speculators.
SPECULATORS = ("mlp", "medusa", "eagle3", "draft model")
REHEARSED_FAMILIES = ("qwen2", "t5")
REHEARSED_KERNELS = ("norm", "sample", "describe")


def _case(name: str, function: str, seconds: float, *arguments: str | int, is_rehearsed: bool = True) -> Case:
    return Case(name, f"bench.gpu.cases.{function}", seconds, arguments, is_rehearsed)


def _compare_kernels(dtype: str, group: str, seconds: float, is_rehearsed: bool) -> tuple[Case, ...]:
    return tuple(
        _case(
            f"{kernel} {dtype} {group}",
            "kernels:compare",
            seconds,
            kernel,
            dtype,
            group,
            is_rehearsed=is_rehearsed and kernel in REHEARSED_KERNELS,
        )
        for kernel in KERNELS
        if group != "others"
        or kernel not in ("begin_step", "sample", "describe", "accept_drafts", "group_rows")
    )


_FAR = tuple(
    _case(f"{kernel} far", "kernels:compare_far", 20, kernel, is_rehearsed=kernel == "turn_and_keep")
    for kernel in CACHED
)
_TYPES = (
    *_compare_kernels("float16", "models", 30, is_rehearsed=False),
    *_compare_kernels("float32", "models", 30, is_rehearsed=False),
    *_compare_kernels("bfloat16", "others", 30, is_rehearsed=True),
)

STAGES = (
    Stage(
        "probes",
        10,
        (
            _case("machine", "probes:describe_machine", 10),
            _case("imports", "probes:import_all", 10),
            _case("products", "probes:check_products", 10),
            _case("pools", "probes:check_pools", 10),
        ),
        num_parallel=2,
        libraries=TORCH,
    ),
    Stage(
        "limits",
        10,
        (
            _case("bandwidth", "limits:measure_bandwidth", 8),
            _case("products", "limits:measure_products", 8),
            _case("launches", "limits:measure_launches", 8),
            _case("copies", "limits:measure_copies", 8),
        ),
        libraries=TORCH,
    ),
    Stage(
        "kernels", 35, (*_compare_kernels("bfloat16", "models", 20, is_rehearsed=True), *_FAR), 4, LIBRARIES
    ),
    Stage(
        "steps",
        35,
        (
            _case("0.6b captured and eager", "steps:compare_captured", 30, "0.6b"),
            _case("0.6b steady", "steps:check_steady", 15, "0.6b"),
        ),
        num_parallel=2,
        libraries=LIBRARIES,
    ),
    Stage(
        "speed",
        50,
        (
            _case("8b decode", "speed:measure_decodes", 35, "8b"),
            _case("8b prefill", "speed:measure_prompt", 25, "8b"),
            _case("8b short prompts", "speed:measure_short_prompts", 20, "8b"),
            _case("0.6b decode", "speed:measure_decodes", 20, "0.6b", is_rehearsed=False),
            _case("attention", "speed:measure_attention", 15),
            _case("8b fp8 cache", "speed:measure_float8_cache", 20, "8b"),
            _case("linears", "speed:measure_linears", 10),
            _case("products of few rows", "few_rows:measure_products", 20),
            _case("8b of few rows", "few_rows:measure_steps", 40),
            _case("states", "states:measure", 15),
            _case("products of codes", "codes:measure_products", 25),
            _case("8b of codes", "codes:measure_steps", 40),
            _case("8b adapters", "grouped:measure_adapters", 20, "8b"),
            _case("experts", "grouped:measure_experts", 10),
        ),
        libraries=LIBRARIES,
    ),
    Stage(
        "features",
        55,
        (
            _case("bfloat16", "features:check_bfloat16", 25),
            *(
                _case(kind, "features:check_kind", 25, kind, is_rehearsed=kind in REHEARSED_KINDS)
                for kind in KINDS
            ),
            _case("adapters", "features:check_tuned", 30, "adapters"),
            _case("soft prompts", "features:check_tuned", 30, "prompts", is_rehearsed=False),
            _case("drafts", "drafts:check", 25),
            _case("cost of drafts", "drafts:measure", 20, "0.6b"),
            *(
                _case(f"speculator: {kind}", "speculators:check", 25, kind, is_rehearsed=kind == "mlp")
                for kind in SPECULATORS
            ),
        ),
        num_parallel=4,
        libraries=LIBRARIES,
    ),
    Stage(
        "families",
        110,
        (
            *(
                _case(name, "families:check_family", 25, name, is_rehearsed=name in REHEARSED_FAMILIES)
                for name in FAMILIES
            ),
            *(
                _case(f"{name} through transformers", "foreign:check_model", 25, name, is_rehearsed=i == 0)
                for i, name in enumerate(FOREIGN)
            ),
            *(_case(name, "families:check_family", 25, name, is_rehearsed=False) for name in VARIANTS),
        ),
        num_parallel=4,
        libraries=LIBRARIES,
    ),
    Stage("types", 45, _TYPES, 4, LIBRARIES),
    Stage(
        "sanitizer",
        35,
        (
            _case("memcheck", "sanitizer:run_tool", 35, "memcheck"),
            _case("racecheck", "sanitizer:run_tool", 35, "racecheck"),
        ),
        num_parallel=2,
        libraries=LIBRARIES,
    ),
    Stage(
        "service",
        95,
        (
            _case("1b", "service:measure", 50, "1b"),
            _case("transformers 1b", "peers:measure", 60, "1b"),
        ),
        libraries=LIBRARIES,
    ),
)


def list_functions() -> Iterator[str]:
    for stage in STAGES:
        yield from (case.function for case in stage.cases)


def choose_rehearsed(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """Return the stages with the cases that a rehearsal on the CPU runs, one at a time."""
    return tuple(
        Stage(
            stage.name,
            stage.seconds,
            tuple(case for case in stage.cases if case.is_rehearsed),
            libraries=stage.libraries,
        )
        for stage in stages
    )
