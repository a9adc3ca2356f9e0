"""Check a shard on a device, from its configuration to tokens, and the information it reports."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.cuda.graph_sizes import of_rows
from tests.support.cuda.late_device import LateDevice
from tests.support.cuda.late_platform import late_platform
from tests.support.shard.checkpoints import write_llama, write_model
from tests.support.shard.driver import Request, Router, configure, opening
from tests.support.shard.family_cases.all import CASES
from tests.support.shard.foreign_cases import CASES as FOREIGN
from tests.support.shard.messages import Steps
from tests.support.shard.portable import plain
from tests.support.shard.stepping import read_config
from tgis.pb import shard_pb2 as pb
from tgis.shard.collectives import CPU, ProcessGroup
from tgis.shard.kernels.cuda.implementations import KERNELS, Implementations
from tgis.shard.models.hf_transformers.arithmetic import DeviceArithmetic
from tgis.shard.models.hf_transformers.load import make_spec
from tgis.shard.quant.schemes import int8
from tgis.shard.runner.graph_sizes import GraphSize, add_adapter_sizes, graph_sizes
from tgis.shard.server import log_failure
from tgis.shard.startup import engine_choice
from tgis.shard.startup import load as startup_load
from tgis.shard.startup.load import load, load_where_possible
from tgis.shard.startup.platforms import choose_platform
from tgis.shard.startup.platforms.cuda import choose_graph_sizes, find_draft_sizes, find_sizes
from tgis.shard.startup.platforms.interface import DeviceError
from tgis.shard.startup.prepare import prepare
from tgis.shard.startup.shard_info import describe_shard


@pytest.fixture(scope="module")
def model_path(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("grouped_queries")


def test_a_shard_with_graphs(model_path: Path) -> None:
    """Check that the dummy block is not counted and that captured steps give the CPU's tokens."""
    on, runs = late_platform(LateDevice()), []
    for runner in (
        load(configure(model_path), on=plain(CPU)),
        load(configure(model_path, cuda_graphs="2,5,64"), on=on),
    ):
        requests = [Request([7, 8, 9 + i], max_new_tokens=8) for i in range(5)]
        router = Router(runner)
        router.run(list(requests))
        runs.append([request.generated for request in requests])
    assert runs[0] == runs[1]
    info = runner.info
    assert info.num_blocks == 8 * 192 // 16
    assert list(info.graph_sizes) == [2, 5]
    assert list(info.replaced_kernels) == list(KERNELS)
    paths = {response.path for response in router.responses}
    assert info.num_prompt_graphs == len(graph_sizes([2, 5], 8, 512)) - 2
    assert paths - {pb.STEP_PATH_UNSPECIFIED} == {pb.STEP_PATH_GRAPH}


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"speculate": 3}, pb.STEP_PATH_GRAPH),
        ({"speculate": 0}, pb.STEP_PATH_DRAFTS),
        ({"speculate": 3, "cuda_graphs": "0"}, pb.STEP_PATH_MODEL),
    ],
)
def test_a_shard_captures_graphs_of_drafts_if_there_are_drafts(
    model_path: Path, options: dict[str, Any], path: pb.StepPath
) -> None:
    runner = load(configure(model_path, **options), on=late_platform(LateDevice()))
    steps = Steps(runner.info.block_size, runner.info.num_blocks)
    opened = [opening(Request([7, 8, 9], 9, row=0))]
    runner.launch(steps.step([(0, 0, 3)], opened)).answer()
    assert runner.launch(steps.step([(0, 3, 4)], drafts={0: [5, 6]})).answer().path == path


def test_default_graphs_and_none(model_path: Path) -> None:
    on = late_platform(LateDevice())
    assert list(load(configure(model_path), on=on).info.graph_sizes) == [1, 2, 4, 8]
    assert not load(configure(model_path, cuda_graphs="0"), on=on).info.graph_sizes


@pytest.mark.parametrize(
    ("replaced", "sizes"),
    [
        ("attend_segments", []),
        ("attend_tiles", of_rows(1, 2, 3)),
        ("norm", [*of_rows(1, 2, 3), GraphSize(3, 16)]),
    ],
)
def test_graphs_need_the_kernels_that_attend(replaced: str, sizes: list[GraphSize]) -> None:
    implementations = Implementations.choose(frozenset({replaced}))
    result = choose_graph_sizes(implementations, None, max_rows=3, max_prompt_tokens=20)
    assert list(result) == sizes


def test_graphs_with_adapters_need_their_kernel(caplog: pytest.LogCaptureFixture) -> None:
    sizes = graph_sizes(None, 3, 20)
    whole, partial = (
        choose_graph_sizes(Implementations.choose(frozenset(replaced)), None, 3, 20, has_adapters=True)
        for replaced in ((), ("add_low_rank",))
    )
    assert whole == add_adapter_sizes(sizes)
    assert partial == sizes
    assert "no CUDA graphs of steps with adapters" in caplog.text


def test_options_of_gpus_on_a_cpu(model_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(configure(model_path, cuda_graphs="1,2", cuda_memory_fraction=0.5))
    text = "has no effect: the model runs on a CPU"
    assert caplog.messages[:2] == [f"--cuda-graphs {text}", f"--cuda-memory-fraction {text}"]
    caplog.clear()
    load(configure(model_path, rank=0))
    assert text not in caplog.text


def test_arithmetic_of_cpus_on_a_gpu(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on = late_platform(LateDevice())
    monkeypatch.setattr(choose_platform, "find_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(choose_platform, "make_platform", lambda *_, **__: on)
    caplog.set_level(logging.WARNING)
    assert prepare(configure(model_path)).on is on
    assert not caplog.messages
    prepare(configure(model_path, cpu_arithmetic="bfloat16"))
    assert caplog.messages == ["--cpu-arithmetic has no effect: the model runs on a GPU"]


def list_head_configs(model: dict[str, Any]) -> dict[str, tuple[dict[str, Any], int]]:
    """Return config.json of speculators, and the width of their states."""
    return {
        "mlp": ({"model_type": "mlp_speculator", "inner_dim": 96}, 96),
        "mlp of the model's width": ({"model_type": "mlp_speculator", "inner_dim": 0}, 32),
        "medusa": ({"medusa_num_heads": 3}, 32),
        "eagle": ({**model, "architectures": ["LlamaForCausalLMEagle"], "head_dim": 24}, 32),
        "eagle3": ({**model, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}, 32),
        "draft model": ({**model, "hidden_size": 48, "head_dim": 16}, 48),
    }


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_gpu_s_kernels_are_checked_at_the_sizes_of_speculators(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantize: str | None
) -> None:
    on, made = late_platform(LateDevice()), []
    monkeypatch.setattr(choose_platform, "find_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(
        choose_platform, "make_platform", lambda *_, model, **__: made.append(model.draft) or on
    )
    prepare(configure(model_path, quantize=quantize))
    assert made == [None]
    kept = None if quantize is None else int8.LAYOUT
    for kind, (settings, width) in list_head_configs(read_config(model_path)).items():
        heads = tmp_path / kind
        heads.mkdir()
        (heads / "config.json").write_text(json.dumps(settings))
        save_file({"norm.weight": torch.ones(1)}, heads / "model.safetensors")
        plan = prepare(configure(model_path, speculator=str(heads), quantize=quantize))
        shape = made[-1]
        model = find_sizes(plan.choice.spec, 1, layout=kept, cache_type=torch.float8_e4m3fn)
        sizes = find_draft_sizes(shape, model)
        assert (shape.width, sizes.hidden_size, sizes.owner) == (width, width, "the speculator's")
        assert (sizes.vocab_size, sizes.cache_types) == (model.vocab_size, model.cache_types)
        assert sizes.codes == (() if kept is None or kind == "draft model" else (kept,))
        if "head_dim" in settings:
            assert sizes.head_dim == settings["head_dim"]
            assert sizes.num_heads == settings["num_attention_heads"]
            assert sizes.ffn_size == settings["intermediate_size"]
        else:
            assert (sizes.head_dim, sizes.ffn_size) == (model.head_dim, width // 2)


TRANSFORMERS = {"deployment_framework": "hf_transformers"}
OBSTACLES = {
    "gemma4_text": "its layers have different heads",
    "deepseek_v3": "its latent attention has not been tried on GPUs",
}


@pytest.mark.parametrize("case", OBSTACLES)
def test_models_that_gpus_cannot_run(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They run on the CPU with a warning, but are refused if the operator requires GPUs."""
    write_model(tmp_path, CASES[case]())
    caplog.clear()
    reason = f"GPUs cannot run this model: {OBSTACLES[case]}; use --device cpu or auto"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(DeviceError, match=reason):
        prepare(configure(tmp_path, device="cuda"))
    assert not caplog.messages
    assert prepare(configure(tmp_path, device="auto")).on.device.type == "cpu"
    [warning] = caplog.messages
    assert warning == f"the model runs on the CPU, because GPUs cannot run it: {OBSTACLES[case]}"
    caplog.clear()
    assert prepare(configure(tmp_path, device="auto", rank=1, world_size=2)).on.device.type == "cpu"
    assert prepare(configure(tmp_path, device="cpu")).on.device.type == "cpu"
    assert not caplog.messages


def test_several_shards_of_transformers_code_run_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, FOREIGN["phi"]())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    reason = "hf_transformers supports several shards only on the CPU"
    with pytest.raises(DeviceError, match=f"{reason}; use --device cpu or auto"):
        prepare(configure(tmp_path, device="cuda", world_size=2))
    assert prepare(configure(tmp_path, device="auto", world_size=2)).on.device.type == "cpu"
    assert reason in caplog.messages[-1]
    settings = read_config(tmp_path)
    choose = engine_choice.choose
    assert choose(tmp_path, settings, None, 1, trust_remote_code=False).gpu_obstacle is None


@pytest.mark.parametrize("option", ["auto", "cuda"])
def test_code_that_fails_on_a_gpu_runs_on_the_cpu(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, FOREIGN["phi"]())
    on = replace(late_platform(LateDevice()), device=torch.device("cuda", 0))
    make = choose_platform.make_platform
    monkeypatch.setattr(
        choose_platform, "find_device", lambda option, *_: CPU if option == "cpu" else on.device
    )
    monkeypatch.setattr(
        choose_platform,
        "make_platform",
        lambda device, **more: on if device.type == "cuda" else make(device, **more),
    )
    monkeypatch.setattr(startup_load, "connect", lambda *_: ProcessGroup(0, 1))
    monkeypatch.setattr(DeviceArithmetic, "tolerance", 1e-12)
    config = configure(tmp_path, device=option, max_sequence_length=64, dtype="float32")
    reason = "model type 'phi' cannot be served through transformers: its scores change"
    if option == "cuda":
        with pytest.raises(DeviceError, match=f"GPUs cannot run this model: {reason}"):
            load_where_possible(config)
        return
    plan, runner = load_where_possible(config)
    assert plan.on.device.type == "cpu"
    text = f"the model runs on the CPU, because GPUs cannot run it: {reason}"
    assert any(message.startswith(text) for message in caplog.messages)
    Router(runner).run([Request([7, 8, 9], 2)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "heads"), [("phi", (4, 2, 8)), ("gemma4_text", (4, 2, 16)), ("deepseek_v3", (4, 4, 12))]
)
def test_kernels_are_checked_for_the_heads_of_transformers_code(
    case: str, heads: tuple[int, int, int], tmp_path: Path
) -> None:
    FOREIGN[case]().save_pretrained(tmp_path)
    planned = make_spec(tmp_path, read_config(tmp_path), trust_remote_code=False)
    sizes = find_sizes(planned, num_ranks=1)
    assert (sizes.num_heads, sizes.num_kv_heads, sizes.head_dim) == heads
    assert sizes.vocab_size == 99
    assert sizes.states is sizes.experts is None
    write_model(tmp_path, FOREIGN[case]())
    actual = load(configure(tmp_path, max_sequence_length=64, **TRANSFORMERS)).model.spec
    assert (actual.num_heads, actual.num_kv_heads, actual.head_dim) == heads


@pytest.mark.parametrize(
    ("stored", "asked", "kept"),
    [
        (torch.float32, None, "bfloat16"),
        (torch.float32, "float32", "float32"),
        (torch.float32, "float16", "float16"),
        (torch.float16, None, "float16"),
    ],
)
def test_float32_weights_on_a_gpu(
    stored: torch.dtype, asked: str | None, kept: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_llama(tmp_path, dtype=stored)
    on = replace(late_platform(LateDevice()), device=torch.device("cuda", 0))
    with caplog.at_level(logging.INFO):
        info = describe_shard(prepare(configure(tmp_path, dtype=asked), on))
    assert (info.weight_dtype, info.cache_dtype) == (kept, kept)
    text = "the float32 weights are rounded to bfloat16, because --dtype is unset"
    assert (text in caplog.messages) == (kept == "bfloat16")


MEMORY = (
    "a step ran out of GPU memory, and this process exits: reduce --max-step-tokens, --max-batch-size "
    "or --kv-cache-tokens"
)
ILLEGAL = "CUDA error: an illegal memory access was encountered"
ASSERTED = "Triton Error [CUDA]: device-side assert triggered"
ADVICE = "\nCUDA kernel errors might be asynchronously reported at some other API call"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0"), MEMORY),
        (
            torch.AcceleratorError(ILLEGAL + ADVICE),
            f"the GPU failed in a step, and this process exits: {ILLEGAL}",
        ),
        (RuntimeError(ASSERTED), f"the GPU failed in a step, and this process exits: {ASSERTED}"),
    ],
)
def test_errors_of_gpus_end_in_a_sentence(
    error: Exception, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    log_failure(error)
    [record] = caplog.records
    assert (record.getMessage(), record.exc_info) == (text, None)


@pytest.mark.parametrize("error", [RuntimeError("shapes cannot be multiplied"), ValueError("CUDA error")])
def test_other_errors_come_with_the_place(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    log_failure(error)
    [record] = caplog.records
    assert record.getMessage() == "a step failed, and this process exits"
    assert record.exc_info is not None
    assert record.exc_info[1] is error
