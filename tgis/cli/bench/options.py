"""Declares the options of `tgis bench`."""

from dataclasses import dataclass

from tgis.config.option import option
from tgis.load.apis.catalogue import APIS
from tgis.load.report.files import WRITERS
from tgis.load.workload.constraints import RULES
from tgis.load.workload.lengths import FORMS

LENGTHS = f"tokens: {FORMS}"


@dataclass(frozen=True, kw_only=True)
class BenchPlace:
    """Options that say which service is measured."""

    target: str = option("HOST:PORT, or the URL of an HTTP API.", "localhost:8033", env=False)
    api: str | None = option(
        "API of the calls; unset: fmaas for HOST:PORT, chat for a URL.", None, env=False, choices=tuple(APIS)
    )
    model: str | None = option(
        "Model named in the calls; unset: none over gRPC, the first of /v1/models over OpenAI's API.",
        None,
        env=False,
    )
    tls: bool = option("Use TLS; without --ca-cert, the system's CAs are trusted.", False, env=False)
    ca_cert: str | None = option("PEM file of the CAs to trust; implies --tls.", None, env=False)
    cert: str | None = option("PEM file of the client's certificate; needs --key.", None, env=False)
    key: str | None = option("PEM file of the client's private key; needs --cert.", None, env=False)
    token: str | None = option(
        "Bearer token; unset: none. Other users of this machine can read flags: prefer the variable.",
        None,
        env="TGIS_TOKEN",
    )
    timeout: float = option("Maximum duration of a request, in seconds.", 600.0, env=False, minimum=0.001)
    calls_per_connection: int | None = option(
        "Number of calls after which a connection is replaced by a new one; unset: connections are kept.",
        None,
        env=False,
        minimum=1,
    )


@dataclass(frozen=True, kw_only=True)
class BenchLoad:
    """Options that say how much is sent."""

    concurrency: str | None = option(
        "Closed loops: numbers of requests at a time, such as 1,8,32; 1 if no other load is given.",
        None,
        env=False,
    )
    rate: str | None = option("Open loops: requests per second, such as 0.5,2.", None, env=False)
    arrivals: str = option(
        "Distribution of the times of --rate.", "poisson", env=False, choices=("poisson", "constant")
    )
    trace: str | None = option(
        "Open loop: file with the times of requests in seconds, per line a number or an object with "
        "timestamp.",
        None,
        env=False,
    )
    trace_scale: float = option("Factor of the times of --trace.", 1.0, env=False, minimum=0.001)
    sweep: bool = option(
        "Saturate the service with the last --concurrency, 64 if unset, and then send at rates around "
        "what it served.",
        False,
        env=False,
    )
    requests: int | None = option(
        "Number of conversations per run; unset: as many as --duration allows.", None, env=False, minimum=1
    )
    duration: float | None = option(
        "Duration of a run in seconds; unset: 30, or no limit with --requests.", None, env=False, minimum=0.1
    )
    warm_up: int = option("Number of conversations before each run, not counted.", 4, env=False, minimum=0)
    repeats: int = option("Number of runs of each load.", 1, env=False, minimum=1)
    precision: float | None = option(
        "Repeat further, until the 95 % intervals of requests and tokens per second are narrower than plus "
        "or minus this share; unset: do not.",
        None,
        env=False,
        minimum=0.001,
    )
    max_repeats: int = option("Maximum number of runs of a load with --precision.", 10, env=False, minimum=2)
    error_pause: float = option(
        "Closed loops: seconds for which a client waits after a failure.", 0.0, env=False, minimum=0
    )
    processes: int = option("Number of load processes.", 1, env=False, minimum=1, maximum=256)


@dataclass(frozen=True, kw_only=True)
class BenchPrompts:
    """Options that say what is sent."""

    input_tokens: str = option(f"Length of prompts in {LENGTHS}.", "256", env=False)
    exact_input: bool = option(
        "Send prompts that are too long, which the service cuts to exactly the drawn length; not chat.",
        False,
        env=False,
    )
    output_tokens: str = option(f"Length of answers in {LENGTHS}.", "64", env=False)
    may_end_early: bool = option(
        "Let the model end an answer; otherwise answers have exactly the drawn length, where the API can "
        "say so.",
        False,
        env=False,
    )
    prompts: str | None = option(
        "File of prompts, JSON lines or ShareGPT's JSON; unset: random words.", None, env=False
    )
    batch: str = option(
        f"Number of prompts of a call: {FORMS}. Only fmaas, whose answers are whole then, and completions.",
        "1",
        env=False,
    )
    shared_prefix: int = option(
        "Number of tokens with which prompts begin that others begin with, too.", 0, env=False, minimum=0
    )
    num_prefixes: int = option("Number of such beginnings.", 1, env=False, minimum=1)
    turns: int = option(
        "Number of questions of a conversation, each sent with the answers before; 0: all of the file's.",
        1,
        env=False,
        minimum=0,
    )
    adapters: str | None = option("Ids of LoRA adapters, separated by commas, used in turn.", None, env=False)
    adapter_share: float = option(
        "Share of conversations with an adapter.", 1.0, env=False, minimum=0, maximum=1
    )
    soft_prompts: str | None = option(
        "Ids of soft prompts, separated by commas, used in turn; only fmaas.", None, env=False
    )
    soft_prompt_share: float = option(
        "Share of conversations with a soft prompt.", 1.0, env=False, minimum=0, maximum=1
    )
    constraints: str = option(
        f"Shares of conversations with constraints, such as json=0.2,regex=0.1; of {', '.join(RULES)}.",
        "",
        env=False,
    )
    temperature: float | None = option(
        "Temperature of sampling; unset: greedy.", None, env=False, minimum=0.001
    )
    top_k: int | None = option(
        "Number of likeliest tokens that are sampled from; unset: all.", None, env=False, minimum=1
    )
    top_p: float | None = option(
        "Share of the probability that is sampled from; unset: all.",
        None,
        env=False,
        minimum=0.001,
        maximum=1,
    )
    sampled_share: float = option(
        "Share of conversations that are sampled with --temperature; the others are greedy.",
        1.0,
        env=False,
        minimum=0,
        maximum=1,
    )
    repetition_penalty: float | None = option(
        "Penalty of tokens that have already occurred; unset: none.", None, env=False, minimum=0.001
    )
    unary_share: float = option(
        "Share of conversations that ask for whole answers instead of streams.",
        0.0,
        env=False,
        minimum=0,
        maximum=1,
    )
    cancel_share: float = option(
        "Share of conversations whose client cancels the last stream in the middle.",
        0.0,
        env=False,
        minimum=0,
        maximum=1,
    )
    token_details: bool = option(
        "Ask for details of every token; then tokens without text have messages, too. Only fmaas.",
        False,
        env=False,
    )
    distinct: int = option(
        "Number of different conversations, which repeat in turn; their texts must be the same; 0: all are "
        "different.",
        0,
        env=False,
        minimum=0,
    )
    repeat_share: float = option(
        "Share of conversations that repeat another with its seed; their texts must be the same.",
        0.0,
        env=False,
        minimum=0,
        maximum=0.5,
    )
    seed: int = option("Seed of prompts, lengths and times.", 0, env=False, minimum=0)


@dataclass(frozen=True, kw_only=True)
class BenchOutput:
    """Options of the report."""

    slo: str = option(
        "Objectives of good requests in seconds, such as ttft=0.5,itl=0.05,total=10.", "", env=False
    )
    report: tuple[str, ...] = option(
        f"File to write the report to, in the form of its suffix: {', '.join(WRITERS)}; may be repeated.",
        (),
        env=False,
    )
    quiet: bool = option("Print only the table at the end.", False, env=False)
