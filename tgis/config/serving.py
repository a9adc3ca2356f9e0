"""Declares the options of batches and of how the router serves requests."""

from dataclasses import dataclass

from tgis.config.option import Group, in_group, option

SERVICE_NAME = "text-generation-inference.router"
JSON_FORM, JSON_LINES_FORM, SSE_FORM, TGI_FORM = "json", "jsonlines", "sse", "tgi_compat"
GENERATION_CONFIG_AUTO, GENERATION_CONFIG_NONE = "auto", "none"
SHORT_SEQUENCE = "max_sequence_length ({value}) must be at least 2 (1 input + 1 output)"


@in_group(Group.MEMORY)
@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    max_sequence_length: int | None = option(
        "Limit of input plus output tokens; unset: what the model's configuration says.",
        None,
        minimum=2,
        refusal=SHORT_SEQUENCE,
        group=Group.LIMITS,
        is_common=True,
    )
    # Rows of a shard's tables, which are allocated when it starts.
    max_batch_size: int = option(
        "Most sequences in one step.", 256, minimum=1, maximum=65_536, is_common=True
    )
    max_step_tokens: int = option(
        "Most tokens computed in one step; longer prompts are computed in chunks.", 2048, minimum=1
    )


@in_group(Group.LIMITS)
@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    max_concurrent_requests: int = option(
        "Most inputs in the service at once.",
        512,
        minimum=1,
        maximum=100_000,
        refusal="max_concurrent_requests must be > 0",
    )
    max_new_tokens: int | None = option(
        "Upper bound of a request's max_new_tokens; unset: 1024 over gRPC, and the sequence length over "
        "other APIs.",
        None,
        minimum=1,
        refusal="max_new_tokens ({value}) at least 1",
        is_common=True,
    )
    max_top_n_tokens: int = option("Upper bound of a request's top_n_tokens.", 10, minimum=1)
    max_input_tokens: int | None = option(
        "Limit of a request's input tokens; unset: what --max-sequence-length leaves.", None, minimum=1
    )
    max_best_of: int | None = option(
        "Upper bound of `best_of`, the number of texts of which a request gets the best; unset: 2 in TGI's "
        "API, 128 in others.",
        None,
        minimum=1,
    )
    max_stop_sequences: int | None = option(
        "Upper bound of a request's number of stop sequences in TGI's API, and in others if theirs is less; "
        "unset: 4 in TGI's, 16 in OpenAI's and LMI's, 6 over gRPC.",
        None,
        minimum=1,
    )
    max_client_batch_size: int | None = option(
        "Most prompts of a request to OpenAI's /v1/completions, and inputs of one to LMI's; unset: 128.",
        None,
        minimum=1,
    )
    disable_grammar_support: bool = option("Refuse requests whose text must match a grammar.", False)
    lmi_output_formatter: str | None = option(
        "Form of all answers of LMI's API; unset: json, and jsonlines for requests that ask for a stream.",
        None,
        choices=(JSON_FORM, JSON_LINES_FORM, SSE_FORM, TGI_FORM),
        group=Group.NETWORK,
    )
    served_model_name: str | None = option(
        "Names of the model for APIs that name it, separated by commas; unset: --model-name, of a path only "
        "the last folder.",
        None,
        group=Group.MODEL,
    )
    compute_type: str | None = option(
        "Kind of machine that TGI's API names in `x-compute-type`; unset: gpu if the launcher finds GPUs to "
        "use, else cpu.",
        None,
        group=Group.COMPATIBILITY,
    )
    metrics_alias: str | None = option(
        "Also export metrics under the names of another server, for its dashboards and autoscalers.",
        None,
        choices=("vllm",),
        group=Group.COMPATIBILITY,
    )
    chat_template: str | None = option(
        "File of the template that makes a prompt of a chat, in Jinja2's language; unset: the model's.",
        None,
        group=Group.MODEL,
    )
    tokenizer_config_path: str | None = option(
        "File read instead of the tokenizer's tokenizer_config.json for the chat template and the texts of "
        "special tokens; its template is used before those in other files of the model.",
        None,
        group=Group.MODEL,
    )
    tool_call_parser: str = option(
        "Format in which the model writes calls of tools; auto: the chat template shows it; none: it writes "
        "none. docs/openai.md lists the formats.",
        "auto",
        group=Group.MODEL,
    )
    reasoning_parser: str = option(
        "Format in which the model writes its reasoning; auto: the chat template shows it; none: all is "
        "content. docs/openai.md lists the formats.",
        "auto",
        group=Group.MODEL,
    )
    generation_config: str = option(
        "Where OpenAI's API has the values of sampling fields from that a request does not set: auto: the "
        "model's generation_config.json, if it has one; none: OpenAI's own defaults; else a directory with a "
        "generation_config.json.",
        GENERATION_CONFIG_AUTO,
        group=Group.MODEL,
    )
    override_generation_config: str | None = option(
        "JSON object of such values, which win over the file's: temperature, top_p, top_k, min_p and "
        "repetition_penalty.",
        None,
        group=Group.MODEL,
    )
    runtime_adapters: bool = option(
        "Let clients of OpenAI's API name LoRA adapters of --adapter-cache and --prefix-store-path, and take "
        "the names away, by /v1/load_lora_adapter and /v1/unload_lora_adapter.",
        False,
        group=Group.ADAPTERS,
    )
    tokenization_workers: int | None = option(
        "Threads of each router worker that tokenize; calls with more than 32 KiB of text are tokenized in a "
        "process of their own. Unset: 1 to 8, by the worker's share of the cores.",
        None,
        minimum=1,
        refusal="tokenization_workers must be > 0",
        group=Group.MEMORY,
    )
    output_special_tokens: bool = option("Keep special tokens in the text.", False)
    default_include_stop_seqs: bool = option(
        "Whether a stop sequence stays in the text if a request does not say.", True, takes_value=True
    )
    max_guided_bytes: int = option(
        "Bytes of the largest grammar, schema or list of choices in a request.", 65536, minimum=1
    )
    watermark_gamma: float = option(
        "Share of the vocabulary on the green list of a watermark, for requests that ask for one.",
        0.5,
        minimum=0.01,
        maximum=0.99,
    )
    watermark_delta: float = option(
        "Added to the logits of a watermark's green tokens.", 2.0, minimum=0, maximum=100
    )
    steps_in_flight: int = option(
        "Most unanswered steps; 1 sends a step only after the answer to the one before.",
        2,
        minimum=1,
        maximum=8,
        group=Group.MEMORY,
    )
    speculate: int = option(
        "Most tokens of a sequence that a step computes ahead, guessed from what followed its newest tokens "
        "where they occurred before; outputs stay the same; 0: none.",
        0,
        minimum=0,
        maximum=16,
        group=Group.MEMORY,
    )
    reserve_output: bool = option(
        "Begin a request only when the cache has room for its input and all tokens that it may generate, so "
        "that no running request ever gives up its blocks to another.",
        False,
        group=Group.MEMORY,
    )
    decode_step_ms: float = option(
        "Predicted time that a step may take while requests are decoding. Prompts are cut into chunks that "
        "fit, and none gets more of a step than those requests do.",
        250.0,
        minimum=1,
        group=Group.MEMORY,
    )
    first_token_timeout: float | None = option(
        "Seconds within which a text must have its first token, from its acceptance on; later it fails. "
        "Unset: no limit.",
        None,
        minimum=0.001,
    )
    next_token_timeout: float | None = option(
        "Seconds within which each further token of a text must come; later the text fails. Unset: no limit.",
        None,
        minimum=0.001,
    )
    shutdown_timeout: float = option(
        "Seconds that requests in flight get to finish after SIGTERM.", 30.0, minimum=0, group=Group.LIFECYCLE
    )
    recovery_timeout: float = option(
        "Seconds that requests wait for lost shards to come back.", 300.0, minimum=0, group=Group.LIFECYCLE
    )
    log_text_chars: int = option(
        "Characters of input and output that a log line may show.", 0, minimum=0, group=Group.LOGS
    )
    otlp_endpoint: str | None = option(
        "OpenTelemetry collector (gRPC) that traces are sent to; unset: no traces.", None, group=Group.LOGS
    )
    otlp_service_name: str | None = option(
        f"Service name in traces; unset: OTEL_SERVICE_NAME, else {SERVICE_NAME}.", None, group=Group.LOGS
    )
