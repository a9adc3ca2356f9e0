"""LoRA adapters on models in GGUF files, which order the rows of matrices differently, against peft on the
original checkpoint."""

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from tests.support.shard.adapter_cases import ALL_LINEAR, EXCLUDED, choose_whole
from tests.support.shard.checkpoints import write_model
from tests.support.shard.driver import Request, configure
from tests.support.shard.family_oracle import NEW_TOKENS, check, draw_inputs
from tests.support.shard.gguf_cases import CASES
from tests.support.shard.gguf_writer import write_gguf
from tests.support.shard.relay import Copies, serve
from tests.support.shard.stepping import ALONE
from tests.support.shard.tuned import Tuned
from tgis.convert.gguf.model_directory import write_model_directory
from tgis.prompts.errors import AdapterError
from tgis.prompts.lora_files import read_adapter_files
from tgis.shard.startup.load import load

SCALED = ("falcon_h1", "falcon_h1_gate_before_norm")
DECODERS = [case for case, (architecture, _) in CASES.items() if architecture != "t5" and case not in SCALED]
QUICK = ("tied", "qwen3_next", "granitehybrid", "nemotron_h_moe", "deepseek_v3")


def write(case: str, root: Path) -> tuple[Path, Path]:
    """Write a model twice. Return the directories of its checkpoint and of its GGUF file."""
    architecture, make_config = CASES[case]
    written, made = root / "written", root / "made"
    write_model(written, make_config())
    write_gguf(written, root / "model.gguf", architecture, Type.F32)
    made.mkdir()
    write_model_directory([root / "model.gguf"], made)
    return written, made


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in QUICK else [pytest.mark.slow], id=case) for case in DECODERS],
)
def test_equals_peft(case: str, tmp_path: Path) -> None:
    """With an adapter of all linear layers, with one of all matrices, and without one."""
    written, made = write(case, tmp_path)
    base = Tuned(written, tmp_path)
    ids = draw_inputs()[2]
    copies, asked = Copies(str(tmp_path / "shard")), [("", base.answer(ids))]
    excluded = {"exclude_modules": EXCLUDED.get(base.model.config.model_type)}
    for seed, options in enumerate((ALL_LINEAR, choose_whole(base.model))):
        tuned = Tuned(written, tmp_path / str(seed), seed, **options, **excluded)
        tensors, scales = read_adapter_files(tmp_path / str(seed), 1 << 20)
        copies = copies.put("adapter", tensors, {"scales": scales})
        asked.append((copies.digests[-1], tuned.answer(ids)))
    requests = [
        Request(ids, NEW_TOKENS, details={"logprobs": True}, adapter_digest=digest) for digest, _ in asked
    ]
    [served], _ = serve(ALONE, made, 1, [requests], 16, copies)
    for request, (_, answer) in zip(served, asked, strict=True):
        check(request, answer, 3e-4)
    assert len({tuple(request.logprobs) for request in served}) == len(asked)


@pytest.mark.parametrize("case", SCALED)
def test_matrices_with_constant_factors_are_refused(case: str, tmp_path: Path) -> None:
    """The changes of an adapter would need these factors, too, and files do not have them."""
    written, made = write(case, tmp_path)
    Tuned(written, tmp_path / "lora", **ALL_LINEAR, exclude_modules=["out_proj"])
    tensors, scales = read_adapter_files(tmp_path / "lora", 1 << 20)
    copies = Copies(str(tmp_path / "shard")).put("adapter", tensors, {"scales": scales})
    runner = load(configure(made, uds_path=copies.uds_path, dtype="float32"))
    with pytest.raises(AdapterError, match=r"^adapters of this model are not supported in GGUF files, "):
        runner.adapters.load(copies.digests[0])
