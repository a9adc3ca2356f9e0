"""A toy format of quantized checkpoints on every family: same tokens as the plain checkpoint with the
dequantized weights."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.shard import halves
from tests.support.shard.checkpoints import edit_config, write_model
from tests.support.shard.driver import Request, configure
from tests.support.shard.family_cases.all import CASES
from tests.support.shard.family_oracle import draw_inputs
from tests.support.shard.ranks import Ranks
from tests.support.shard.relay import serve
from tests.support.shard.stepping import read_config
from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.opening import count_elements
from tgis.shard.checkpoint.tensors import Stored, WeightsError
from tgis.shard.collectives import ProcessGroup
from tgis.shard.kernels.cpu.ops import CpuKernels
from tgis.shard.layers.ops import Product
from tgis.shard.models import registry, skeleton
from tgis.shard.quant.interface import MatrixRole
from tgis.shard.quant.registry import FORMATS
from tgis.shard.startup import engine_choice
from tgis.shard.startup.platforms.cpu import ON_CPU
from tgis.shard.startup.quantize import check as quantize_check

# Together these stack, transpose, group, use entries of experts, and use the first of several names.
QUICK = {"llama_grouped_queries": 1, "gpt2": 2, "granitemoe": 2, "falcon_40b": 1, "t5": 2}
NUM_TOKENS = 6


@pytest.fixture(autouse=True)
def _format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, halves.NAME, halves.Halves)


def write(case: str, root: Path, group: int = halves.GROUP) -> tuple[Path, Path]:
    """Return the directories of the plain and the quantized checkpoint."""
    plain, quantized, config = root / "plain", root / "quantized", CASES[case]()
    write_model(plain, config)
    halves.write_halves(plain, quantized, config.model_type == "gpt2", group)
    return plain, quantized


def find_code_packer(
    kernels: CpuKernels,
    layout: CodeLayout,
    role: MatrixRole = "linear",
    dtype: torch.dtype = torch.bfloat16,
) -> Callable[[Stored], Product] | None:
    return halves.pack if layout == halves.make_layout() else None


def generate(group: ProcessGroup, directory: Path, packs_codes: bool = False) -> list[Request]:
    """Serve requests in one batch, on a platform with or without products for the format's codes."""
    config = read_config(directory)
    start = [config.get("decoder_start_token_id", 0)] if config.get("is_encoder_decoder") else []
    requests = [
        Request(start or ids, NUM_TOKENS, encoder_token_ids=ids if start else [], details={"logprobs": True})
        for ids in draw_inputs()
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FORMATS, halves.NAME, halves.Halves)
        if packs_codes:
            patch.setattr(CpuKernels, "find_code_packer", find_code_packer)
        crowds, _ = serve(group, directory, 1, [requests], 16)
    return crowds[0] if crowds else []  # only the first rank has them


def plan() -> list[object]:
    """Return all cases on one rank and two; `make test` runs those of `QUICK`."""
    return [
        pytest.param(
            case,
            size,
            id=f"{case}, {size} ranks",
            marks=[] if QUICK.get(case) == size else [pytest.mark.slow],
        )
        for case in CASES
        for size in (1, 2)
    ]


@pytest.mark.parametrize(("case", "size"), plan())
def test_equals_the_plain_checkpoint(case: str, size: int, ranks: Ranks, tmp_path: Path) -> None:
    plain, quantized = write(case, tmp_path)
    expected = ranks.run(size, generate, plain)[0]
    as_floats = ranks.run(size, generate, quantized)[0]
    as_codes = ranks.run(size, generate, quantized, True)[0]
    for one, floats, codes in zip(expected, as_floats, as_codes, strict=True):
        assert len(one.generated) == NUM_TOKENS
        assert (floats.generated, floats.logprobs) == (one.generated, one.logprobs)
        assert codes.generated == one.generated
        assert codes.logprobs == pytest.approx(one.logprobs, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("case", ["gpt2", "granitemoe", "falcon_40b", "t5"])
def test_adapters_are_traced_through_a_format(case: str, tmp_path: Path) -> None:
    plain, quantized = (
        skeleton.build_skeleton(directory, read_config(directory), torch.float32).parts
        for directory in write(case, tmp_path)
    )
    assert plain.cuts == quantized.cuts
    for path, cut in plain.cuts.items():
        trace = quantized.weights.trace(path, cut.shape)
        assert trace == plain.weights.trace(path, cut.shape)
        assert sum(rows.count for rows in trace) == cut.shape[0]


def load(directory: Path, group: ProcessGroup) -> None:
    registry.load(directory, read_config(directory), group, torch.float32)


def test_a_part_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    _, quantized = write("llama_grouped_queries", tmp_path, group=16)
    load(quantized, ProcessGroup(0, 1))
    with pytest.raises(WeightsError) as refused:
        load(quantized, ProcessGroup(1, 2))
    name = "tensor model.layers.0.mlp.down_proj.codes"
    text = f"{quantized}/model.safetensors: {name}: columns 24 to 48 cannot be cut out of groups of 16"
    assert str(refused.value) == text


def test_tensors_that_no_layer_reads_are_refused(tmp_path: Path) -> None:
    """All entries of all experts count as read, but no layer that the model does not have."""
    _, quantized = write("granitemoe", tmp_path)
    load(quantized, ProcessGroup(0, 1))
    edit_config(quantized, {**read_config(quantized), "num_hidden_layers": 1})
    with pytest.raises(
        WeightsError, match=r"first of which is model\.layers\.1\.block_sparse_moe\.input_linear\."
    ):
        load(quantized, ProcessGroup(0, 1))


def test_memory_is_that_of_the_loaded_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, quantized = write("llama_grouped_queries", tmp_path)
    elements, settings = count_elements(plain), read_config(quantized)
    choice = engine_choice.choose(quantized, settings, None, 1, trust_remote_code=False)

    def count_bytes(quantize: str | None = None) -> int:
        config = configure(quantized, quantize=quantize)
        return quantize_check.count_bytes(config, settings, choice, ON_CPU, torch.float16)

    assert count_bytes() == 2 * elements
    assert count_bytes("int8") == elements * 33 // 32 + 2 * 99 * 32
    monkeypatch.setattr(CpuKernels, "find_code_packer", find_code_packer)
    assert count_bytes() == 2 * (elements - 99 * 32) + 2 * (2 * 99 * 32), "a byte and one of the scale"


def test_only_weights_read_weights() -> None:
    """All code except formats calls `Weights.find_matrix`, so that formats are considered. Weights of norms
    are vectors."""
    root = Path(registry.__file__).parents[1]
    known = {
        "checkpoint/weights.py": {".weight"},
        "layers/norm.py": {".weight"},
        "models/registry.py": {"embed.weight", "head.weight"},  # whether a checkpoint has them
        "models/parts/delta_net.py": {"conv.weight", "norm.weight"},
        "models/parts/mamba.py": {"conv.weight", "norm.weight"},
        "models/parts/routing.py": {".weight"},
        # Whether a head has copies of the model's embedding and scores, which are read as matrices.
        "speculators/draft_head.py": {"embed.weight"},
        "speculators/eagle.py": {"fc.weight", "head.weight"},
        "speculators/mtp.py": {".weight"},
        "speculators/medusa.py": {"heads.0.score.weight"},
        "speculators/mlp.py": {".ln.weight"},
        "adapters/lora_mapping.py": {"lora_A.weight", "lora_B.weight"},  # of adapters' files
        "models/hf_transformers/packed_linear.py": {".weight"},  # of transformers' modules
        "quantize/plan.py": {".weight"},  # of the checkpoint's modules, which are replaced
        # of GGUF files that are written
        "quantize/gguf/metadata.py": {".weight"},
        "quantize/gguf/output.py": {"output.weight"},
        "quantize/gguf/tensors.py": {
            "token_embd.weight",
            "output.weight",
            "ffn_gate_inp.weight",
            "position_embd.weight",
        },
    }
    patterns = root / "models" / "unread_tensors.py"
    formats = set((root / "quant" / "formats").glob("*.py"))
    actual: dict[str, set[str]] = {}
    for file in set(root.rglob("*.py")) - {patterns} - formats:
        constants = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)]
        texts = {node.value for node in constants if isinstance(node.value, str)}
        if named := {text for text in texts if text.endswith(".weight")}:
            actual[file.relative_to(root).as_posix()] = named
    assert actual == known
