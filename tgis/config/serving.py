"""Declares the options of batches and of how the router serves requests."""

from dataclasses import dataclass

from tgis.config.option import Group, in_group, option

SERVICE_NAME = "text-generation-inference.router"
JSON_FORM, JSON_LINES_FORM, SSE_FORM, TGI_FORM = "json", "jsonlines", "sse", "tgi_compat"
GENERATION_CONFIG_AUTO, GENERATION_CONFIG_NONE = "auto", "none"
MIN_PRIORITY = -(2**31)
SHORT_SEQUENCE = "max_sequence_length ({value}) must be at least 2 (1 input + 1 output)"


@in_group(Group.MEMORY)
@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    max_sequence_length: int | None = option(
        "Maximum number of input plus output tokens of a sequence; unset: the length in the model's "
        "configuration.",
        None,
        minimum=2,
        refusal=SHORT_SEQUENCE,
        group=Group.LIMITS,
        is_common=True,
    )
    # Rows of a shard's tables, which are allocated when it starts.
    max_batch_size: int = option(
        "Maximum number of sequences in one step.", 256, minimum=1, maximum=65_536, is_common=True
    )
    max_step_tokens: int = option(
        "Maximum number of tokens computed in one step; longer prompts are split into chunks.",
        2048,
        minimum=1,
    )
    # Shards on GPUs capture graphs that verify drafts.
    speculate: int | None = option(
        "Maximum number of draft tokens per sequence and step. Without --speculator, they are copied from "
        "what followed the sequence's newest tokens where they occurred before (n-gram speculation). Outputs "
        "do not change. 0: none, and --speculator is not loaded; unset: as many as --speculator drafts, else "
        "none.",
        None,
        minimum=0,
        maximum=16,
        group=Group.MEMORY,
    )


@in_group(Group.LIMITS)
@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    max_concurrent_requests: int = option(
        "Maximum number of sequences, running or waiting, in the service at once.",
        512,
        minimum=1,
        maximum=100_000,
        refusal="max_concurrent_requests must be > 0",
    )
    priority_floor: int = option(
        "Lowest value of `priority`, which is served first, that a request may use; lower values count as "
        "this one. The token file may set another one for a tenant.",
        0,
        minimum=MIN_PRIORITY,
    )
    tenant_concurrent_requests: int | None = option(
        "Maximum number of sequences of a tenant, running or waiting, in the service at once; the token file "
        "may set another one for a tenant. Unset: limited by --max-concurrent-requests only.",
        None,
        minimum=1,
    )
    tenant_requests_per_minute: int | None = option(
        "Maximum number of sequences that a tenant may request per minute; further requests are refused as "
        "in an overload. The token file may set another one for a tenant. Unset: no limit.",
        None,
        minimum=1,
    )
    tenant_tokens_per_minute: int | None = option(
        "Maximum number of input and generated tokens of a tenant per minute; further requests are refused "
        "as in an overload. The token file may set another one for a tenant. Unset: no limit.",
        None,
        minimum=1,
    )
    max_new_tokens: int | None = option(
        "Maximum value of a request's max_new_tokens; unset: 1024 over gRPC, and the sequence length over "
        "other APIs.",
        None,
        minimum=1,
        refusal="max_new_tokens ({value}) must be at least 1",
        is_common=True,
    )
    max_top_n_tokens: int = option("Maximum value of a request's top_n_tokens.", 10, minimum=1)
    max_input_tokens: int | None = option(
        "Maximum number of a request's input tokens; unset: limited by --max-sequence-length only.",
        None,
        minimum=1,
    )
    max_best_of: int | None = option(
        "Maximum value of a request's `best_of`, the number of texts generated to choose the best from; "
        "unset: 2 in TGI's API, 128 in others.",
        None,
        minimum=1,
    )
    max_stop_sequences: int | None = option(
        "Maximum number of stop sequences of a request in TGI's API; it also raises the limits of the other "
        "APIs, but never lowers them. Unset: 4 in TGI's API, 16 in OpenAI's and LMI's, 6 over gRPC.",
        None,
        minimum=1,
    )
    max_client_batch_size: int | None = option(
        "Maximum number of prompts in a request to OpenAI's /v1/completions, and of inputs in a request to "
        "LMI's API; unset: 128.",
        None,
        minimum=1,
    )
    disable_grammar_support: bool = option(
        "Refuse requests that constrain the output with a grammar, a schema or choices.", False
    )
    lmi_output_formatter: str | None = option(
        "Format of every response of LMI's API; unset: jsonlines for requests that ask for a stream, json "
        "for others.",
        None,
        choices=(JSON_FORM, JSON_LINES_FORM, SSE_FORM, TGI_FORM),
        group=Group.NETWORK,
    )
    served_model_name: str | None = option(
        "Names by which clients of the HTTP APIs request the model, separated by commas; unset: "
        "--model-name, or its last folder if that is a path.",
        None,
        group=Group.MODEL,
    )
    compute_type: str | None = option(
        "Value of the header `x-compute-type` in responses of TGI's API; unset: gpu if the launcher detects "
        "usable GPUs, else cpu.",
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
        "File with the Jinja2 template that turns a chat into a prompt; unset: the model's own.",
        None,
        group=Group.MODEL,
    )
    tokenizer_config_path: str | None = option(
        "File that replaces the tokenizer's tokenizer_config.json as the source of the chat template and of "
        "the special tokens' texts; its template takes precedence over those in the model's other files.",
        None,
        group=Group.MODEL,
    )
    tool_call_parser: str = option(
        "Format of the tool calls in the model's output; auto: detected from the chat template; none: tool "
        "calls are not parsed. docs/openai.md lists the formats.",
        "auto",
        group=Group.MODEL,
    )
    reasoning_parser: str = option(
        "Format of the reasoning in the model's output; auto: detected from the chat template; none: all "
        "text is returned as content. docs/openai.md lists the formats.",
        "auto",
        group=Group.MODEL,
    )
    generation_config: str = option(
        "Source of OpenAI's sampling parameters that a request leaves out; auto: the model's "
        "generation_config.json, if there is one; none: OpenAI's own defaults; any other value: a directory "
        "that contains a generation_config.json.",
        GENERATION_CONFIG_AUTO,
        group=Group.MODEL,
    )
    override_generation_config: str | None = option(
        "JSON object of sampling parameters that override those of --generation-config: temperature, top_p, "
        "top_k, min_p and repetition_penalty.",
        None,
        group=Group.MODEL,
    )
    runtime_adapters: bool = option(
        "Let clients of OpenAI's API add and remove names of LoRA adapters of --adapter-cache and "
        "--prefix-store-path, with /v1/load_lora_adapter and /v1/unload_lora_adapter.",
        False,
        group=Group.ADAPTERS,
    )
    tokenization_workers: int | None = option(
        "Tokenization threads of each router worker; texts of calls with more than 32 KiB are tokenized in a "
        "separate process. Unset: 1 to 8, depending on the worker's share of the cores.",
        None,
        minimum=1,
        refusal="tokenization_workers must be > 0",
        group=Group.MEMORY,
    )
    output_special_tokens: bool = option("Keep special tokens in the output text.", False)
    default_include_stop_seqs: bool = option(
        "Keep the stop sequence in the output text of requests that do not set it themselves.",
        True,
        takes_value=True,
    )
    max_guided_bytes: int = option(
        "Maximum size, in bytes, of a request's grammar, schema or list of choices.", 65536, minimum=1
    )
    watermark_gamma: float = option(
        "Share of the vocabulary in a watermark's green list, for requests that ask for a watermark.",
        0.5,
        minimum=0.01,
        maximum=0.99,
    )
    watermark_delta: float = option(
        "Value added to the logits of tokens in a watermark's green list.", 2.0, minimum=0, maximum=100
    )
    steps_in_flight: int = option(
        "Maximum number of steps sent to the shards before their results arrive; 1: each step waits for the "
        "result of the one before.",
        2,
        minimum=1,
        maximum=8,
        group=Group.MEMORY,
    )
    reserve_output: bool = option(
        "Start a request only when the cache has room for its input and for all tokens that it may generate, "
        "so that no running request is ever preempted.",
        False,
        group=Group.MEMORY,
    )
    decode_step_ms: float = option(
        "Target duration, in milliseconds, of a step while requests are decoding. Prompts are split into "
        "chunks that are predicted to fit into it; no chunk gets a larger share of a step than the decoding "
        "requests.",
        250.0,
        minimum=1,
        group=Group.MEMORY,
    )
    max_queue_time: float | None = option(
        "Maximum time, in seconds, that a request waits for its first step; after it, the request is refused "
        "as in an overload. Unset: no limit.",
        None,
        minimum=0.001,
    )
    first_token_timeout: float | None = option(
        "Maximum time, in seconds, from the acceptance of a request to its first token; after it, the "
        "request fails. Unset: no limit.",
        None,
        minimum=0.001,
    )
    next_token_timeout: float | None = option(
        "Maximum time, in seconds, between two tokens of a request; after it, the request fails. Unset: no "
        "limit.",
        None,
        minimum=0.001,
    )
    shutdown_timeout: float = option(
        "Maximum time, in seconds, for running requests to finish after SIGTERM.",
        30.0,
        minimum=0,
        group=Group.LIFECYCLE,
    )
    recovery_timeout: float = option(
        "Maximum time, in seconds, that requests wait for lost shards to restart.",
        300.0,
        minimum=0,
        group=Group.LIFECYCLE,
    )
    log_text_chars: int = option(
        "Maximum number of characters of a request's input, and of its output, in the log; 0: none.",
        0,
        minimum=0,
        group=Group.LOGS,
    )
    otlp_endpoint: str | None = option(
        "Endpoint of the OpenTelemetry collector (gRPC) that receives traces; unset: no traces.",
        None,
        group=Group.LOGS,
    )
    otlp_service_name: str | None = option(
        f"Service name in traces; unset: OTEL_SERVICE_NAME, else {SERVICE_NAME}.", None, group=Group.LOGS
    )
