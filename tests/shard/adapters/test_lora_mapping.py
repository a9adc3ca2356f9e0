"""Check that read_adapter computes the same weight change as a checkpoint into which the change was merged.

The tests cover every weight packing, on every rank."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.shard.checkpoints import write_model
from tests.support.shard.family_cases.all import CASES
from tests.support.shard.stepping import ALONE, load, read_config
from tgis.prompts.errors import AdapterError
from tgis.shard.adapters.lora_mapping import read_adapter
from tgis.shard.collectives import ProcessGroup
from tgis.shard.layers.lora import Adapter
from tgis.shard.layers.ops import Parts
from tgis.shard.models.skeleton import build_skeleton

# Lookup layers, and tensors that are not layers.
TABLES = re.compile(r".*(embed_tokens|wte|word_embeddings|embed_in|shared)")
OTHERS = re.compile(r".*(norm|ln_|wpe|embed_positions|relative_attention_bias|layernorm).*")
TURNED = re.compile(r"transformer\.h\.\d+\.(attn|mlp)\.(c_attn|c_proj|c_fc|q_attn|kv_attn)")  # in GPT-2
Tensors = dict[str, Tensor]


class Drawn:
    """An adapter for all layers of a checkpoint, or for those that match `only`, and the merged
    checkpoint."""

    def __init__(self, directory: Path, is_turned: bool, only: str = ".*", seed: int = 0) -> None:
        self.tensors: Tensors = {}
        self.scales: dict[str, float] = {}
        self._random = torch.Generator().manual_seed(seed)
        base = load_file(directory / "model.safetensors")
        self.merged = dict(base)
        for name, weight in base.items():
            module = name.removesuffix(".weight")
            if not re.fullmatch(only, module) or OTHERS.fullmatch(module) or not name.endswith(".weight"):
                continue
            if weight.dim() == 3:
                self.merged[name] = weight + self._experts(module, weight)
            elif TABLES.fullmatch(module) and "shared" not in module:
                self.merged[name] = weight + self._draw(module, *weight.shape[::-1], "lora_embedding_{}").T
            elif weight.dim() == 2 and "shared" not in module:
                turn = is_turned and TURNED.fullmatch(module)
                shape = weight.T.shape if turn else weight.shape
                change = self._draw(module, *shape)
                self.merged[name] = weight + (change.T if turn else change)
        head = "embed_out.weight" if any("gpt_neox" in name for name in base) else "lm_head.weight"
        if head not in base:  # the head is tied until one of the two changes
            [tied] = [base[name] for name in base if TABLES.fullmatch(name.removesuffix(".weight"))]
            is_drawn = re.fullmatch(only, "lm_head")
            self.merged[head] = tied + self._draw("lm_head", *tied.shape) if is_drawn else tied.clone()

    def _draw(self, module: str, rows: int, columns: int, kind: str = "lora_{}.weight") -> Tensor:
        rank = 1 + len(self.scales) % 3
        a, b = self._normal(rank, columns), self._normal(rows, rank)
        self._keep(module, kind, a, b)
        return self.scales[module] * b @ a

    def _experts(self, module: str, weight: Tensor) -> Tensor:
        """Create LoRA weights in PEFT's in-memory layout of GraniteMoE's experts."""
        count, rows, columns = weight.shape
        names = {"input_linear": "experts.gate_up_proj", "output_linear": "experts.down_proj"}
        parent, _, last = module.rpartition(".")
        a, b = self._normal(count * 2, columns), self._normal(rows, 2 * count)
        self._keep(f"{parent}.{names[last]}", "lora_{}.weight", a, b)
        by_expert = (b.view(rows, 2, count), a.view(count, 2, columns))
        return self.scales[f"{parent}.{names[last]}"] * torch.einsum("ore,eri->eoi", *by_expert)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random)

    def _keep(self, module: str, kind: str, a: Tensor, b: Tensor) -> None:
        self.scales[module] = 0.5 + len(self.scales) / 8
        self.tensors |= {f"{module}.{kind.format('A')}": a, f"{module}.{kind.format('B')}": b}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


def write(root: Path, case: str) -> Path:
    if not (root / case).exists():
        write_model(root / case, CASES[case]())
    return root / case


def write_merged(root: Path, directory: Path, drawn: Drawn) -> Path:
    merged = root / f"{directory.name}-merged"
    merged.mkdir(exist_ok=True)
    (merged / "config.json").write_bytes((directory / "config.json").read_bytes())
    tensors = {name: tensor.contiguous() for name, tensor in drawn.merged.items()}
    save_file(tensors, merged / "model.safetensors", {"format": "pt"})
    return merged


def own_parts(parts: Parts) -> Iterator[tuple[str, Tensor]]:
    """Return this rank's part of every layer, as loaded."""
    for path, cut in parts.cuts.items():
        stored = parts.weights.find(f"{path}.weight", cut.shape)
        rows = torch.cat([stored.read(part) for part in cut.rows])
        yield path, rows[:, cut.columns or slice(None)]


def unfold(adapter: Adapter, path: str, like: Tensor, is_table: bool) -> Tensor:
    """Return the dense change that the adapter adds to a layer's weight."""
    whole = torch.zeros_like(like)
    for one in adapter.deltas.get(path, ()):
        product = one.a @ one.b
        if is_table:
            whole += product
        else:
            whole[one.first : one.first + one.b.shape[1]] += product.T
    return whole


PACKINGS = {
    "llama_grouped_queries": ".*",
    "llama_shared_kv_head": ".*k_proj|.*up_proj",
    "llama_tied": "lm_head|.*q_proj",
    "qwen2_last_layer_window": ".*embed_tokens",  # tied
    "phi3": ".*",
    "mixtral": ".*",
    "qwen3_moe_some_dense": ".*",
    "granitemoe": ".*(q_proj|linear|layer)",
    "qwen3_next": r".*_attn\.\w*proj\w*",
    "qwen3_5_text": r".*_attn\.(q_proj|in_proj_z|in_proj_a|out_proj)",
    "gpt_neox": ".*",
    "gpt_neox_no_bias": "lm_head|.*query_key_value",  # tied
    "gpt2": ".*",
    "gpt_bigcode": ".*",
    "gpt_bigcode_multi_head": ".*",
    "bloom": ".*",
    "falcon_40b": ".*",
    "falcon_7b": ".*dense|.*query_key_value",
    "mpt": ".*",
    "opt_350m": ".*",
    "t5": ".*",
    "bart": ".*",
}


@pytest.mark.parametrize("case", PACKINGS)
def test_equals_a_change_of_the_checkpoint(root: Path, case: str) -> None:
    directory = write(root, case)
    drawn = Drawn(directory, case == "gpt2", PACKINGS[case])
    merged = write_merged(root, directory, drawn)
    for group in (ALONE, ProcessGroup(0, 2), ProcessGroup(1, 2)):
        parts, changed = load(directory, group).parts, dict(own_parts(load(merged, group).parts))
        adapter = read_adapter(parts, drawn.tensors, drawn.scales)
        for path, weight in own_parts(parts):
            actual = unfold(adapter, path, weight, parts.cuts[path].is_table)
            expected = changed[path] - weight
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4, msg=f"{path} of {group}")
            assert bool(adapter.deltas.get(path)) == bool(expected.count_nonzero())


def read(directory: Path, drawn: Drawn) -> Adapter:
    return read_adapter(load(directory).parts, drawn.tensors, drawn.scales)


def test_jointly_trained_matrices_are_one_part(root: Path) -> None:
    falcon, llama = (write(root, case) for case in ("falcon_40b", "llama_grouped_queries"))
    assert [one.first for one in read(falcon, Drawn(falcon, False)).deltas["blocks.0.attention.qkv"]] == [0]
    assert [one.first for one in read(llama, Drawn(llama, False)).deltas["blocks.0.attention.qkv"]] == [
        0,
        32,
        48,
    ]


def test_parts_are_float32_and_no_views(root: Path) -> None:
    directory = write(root, "llama_grouped_queries")
    drawn = Drawn(directory, False)
    drawn.tensors = {name: tensor.bfloat16() for name, tensor in drawn.tensors.items()}
    widened = {name: tensor.float() for name, tensor in drawn.tensors.items()}
    for tensors in (drawn.tensors, widened):
        adapter = read_adapter(load(directory).parts, tensors, drawn.scales)
        before = [(one.a.clone(), one.b.clone()) for parts in adapter.deltas.values() for one in parts]
        for tensor in tensors.values():
            tensor.fill_(7)
        after = [(one.a, one.b) for parts in adapter.deltas.values() for one in parts]
        for old, new in zip(before, after, strict=True):
            assert all(torch.equal(x, y) and y.is_contiguous() for x, y in zip(old, new, strict=True))
            assert {x.dtype for x in new} == {torch.float32}


def refuse(directory: Path, tensors: Tensors, scales: dict[str, float], cause: str) -> None:
    with pytest.raises(AdapterError, match=re.escape(cause)) as caught:
        read_adapter(load(directory).parts, tensors, scales)
    assert str(directory) not in str(caught.value)


Q = "model.layers.0.self_attn.q_proj"
LINEAR = ("lora_A.weight", "lora_B.weight")
TABLE = ("lora_embedding_A", "lora_embedding_B")


def change(
    module: str, rows: int, columns: int, kinds: tuple[str, str] = LINEAR
) -> tuple[Tensors, dict[str, float]]:
    a, b = torch.randn(2, columns), torch.randn(rows, 2)
    return dict(zip((f"{module}.{kind}" for kind in kinds), (a, b), strict=True)), {module: 1.0}


@pytest.mark.parametrize(
    ("case", "arguments", "cause"),
    [
        (
            "llama_grouped_queries",
            ("transformer.h.0.attn.c_attn", 96, 32),
            "transformer.h.0.attn.c_attn is no linear",
        ),
        ("llama_grouped_queries", (Q.replace("0", "2"), 32, 32), "for another model"),
        ("llama_grouped_queries", (Q, 33, 32), "q_proj changes 33 by 32, not 32 by 32"),
        ("llama_grouped_queries", (Q, 32, 31), "q_proj changes 32 by 31, not 32 by 32"),
        (
            "llama_grouped_queries",
            ("model.layers.0.self_attn.k_proj", 32, 16),
            "changes 32 by 16, not 16 by 32",
        ),
        ("llama_grouped_queries", ("model.embed_tokens", 99, 32), "model.embed_tokens is no linear layer"),
        ("llama_grouped_queries", (Q, 32, 32, TABLE), "q_proj is no table"),
        ("llama_grouped_queries", ("model.embed_tokens", 31, 99, TABLE), "changes 99 by 31, not 99 by 32"),
        ("llama_grouped_queries", ("lm_head", 100, 32), "lm_head changes 100 by 32, not 99 by 32"),
        ("llama_tied", ("lm_head", 100, 32), "lm_head changes 100 by 32, not 99 by 32"),
        ("llama_tied", ("lm_head", 32, 99, TABLE), "lm_head is no table"),
        ("gpt2", ("transformer.h.0.attn.c_attn", 32, 96), "changes 32 by 96, not 96 by 32"),
        ("gpt2", ("transformer.wpe", 32, 512, TABLE), "transformer.wpe is no table"),
        ("mixtral", ("model.layers.0.mlp.experts.gate_up_proj", 96, 31), "for another model"),
        ("mixtral", ("model.layers.0.mlp.experts.gate_up_proj", 95, 32), "for another model"),
        ("gemma3_multimodal", ("model.vision_tower.encoder.layers.0.mlp.fc1", 8, 8), "changes no layer"),
        ("t5", ("shared", 32, 99, TABLE), "encoder-decoder"),
        ("t5", ("encoder.embed_tokens", 32, 99, TABLE), "encoder.embed_tokens is no table"),
        ("bart", ("model.shared", 32, 99, TABLE), "encoder-decoder"),
    ],
    ids=str,
)
def test_adapters_for_other_models(root: Path, case: str, arguments: tuple[object, ...], cause: str) -> None:
    refuse(write(root, case), *change(*arguments), cause)  # type: ignore[arg-type]


def test_one_layer_under_two_names(root: Path) -> None:
    (one, scales), (other, more) = (
        change(name, 96, 32) for name in ("transformer.h.0.attn.c_attn", "h.0.attn.c_attn")
    )
    refuse(write(root, "gpt2"), one | other, scales | more, "h.0.attn.c_attn under two names")


@pytest.mark.parametrize("case", ["llama_grouped_queries", "llama_tied", "gpt_neox", "t5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_copies_of_the_models_tables(root: Path, case: str, dtype: torch.dtype) -> None:
    """Check that copies which differ only by rounding are accepted and others refused, also with a grown
    vocabulary."""
    directory = write(root, case)
    base = load_file(directory / "model.safetensors")
    names = {"t5": ("shared", "lm_head"), "gpt_neox": ("gpt_neox.embed_in", "embed_out")}
    embed, head = names.get(case, ("model.embed_tokens", "lm_head"))
    tables = {embed: base[f"{embed}.weight"], "lm_head": base.get(f"{head}.weight", base[f"{embed}.weight"])}
    tensors, scales = change("lm_head", 99, 32)
    for name, table in tables.items():
        copied = tensors | {f"{name}.base": table.to(dtype)}
        assert read_adapter(load(directory).parts, copied, scales).deltas.keys() == {"head"}
        other, grown = table.clone(), torch.cat([table, table[:1]])
        other[98, 31] += 0.05
        for wrong in (other, grown):
            copied[f"{name}.base"] = wrong.to(dtype)
            refuse(directory, copied, scales, f"other weights of {name}")
    refuse(
        directory,
        tensors | {"model.layers.0.base": torch.randn(2, 2)},
        scales,
        "other weights of model.layers.0",
    )


def test_a_model_that_vanished(root: Path, tmp_path: Path) -> None:
    """Check that the model's tables are read again only when the adapter contains copies of them."""
    write_model(tmp_path / "model", CASES["llama_tied"]())
    parts = load(tmp_path / "model").parts
    (tmp_path / "model" / "model.safetensors").unlink()
    tensors, scales = change(Q, 32, 32)
    assert read_adapter(parts, tensors, scales).deltas.keys() == {"blocks.0.attention.qkv"}
    with pytest.raises(AdapterError, match="cannot be read") as caught:
        read_adapter(parts, tensors | {"lm_head.base": torch.randn(99, 32)}, scales)
    assert str(tmp_path) not in str(caught.value)


def test_an_outline_gives_the_same_errors(root: Path) -> None:
    """Check that an outline without the model's weights finds the same errors, as a check before deployment
    does."""
    directory = write(root, "falcon_40b")
    drawn = Drawn(directory, False)
    parts = build_skeleton(directory, read_config(directory), torch.float32).parts
    assert (
        read_adapter(parts, drawn.tensors, drawn.scales).deltas.keys() == read(directory, drawn).deltas.keys()
    )
    with pytest.raises(AdapterError, match="for another model"):
        read_adapter(parts, *change(Q, 32, 32))
