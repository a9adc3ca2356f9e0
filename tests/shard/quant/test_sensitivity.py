"""Rule that selects the weights with 8 bits."""

from tgis.shard.quant.sensitivity import UNKNOWN, Sensitivity

RULE = Sensitivity(num_layers=32, num_value_rows=128)


def test_values_are_sensitive() -> None:
    assert RULE.find_rows("blocks.5.attention.qkv", 1024) == slice(896, 1024)
    assert RULE.find_rows("decoder.blocks.5.cross.kv", 1024) == slice(512, 1024)
    for module in ("attention.out", "cross.q", "mlp.up"):
        assert RULE.find_rows(f"blocks.5.{module}", 1024) == slice(1024, 1024)


def test_the_last_layer_is_sensitive() -> None:
    for module in ("attention.qkv", "attention.out", "mlp.up", "mlp.experts.3.down"):
        assert RULE.find_rows(f"blocks.31.{module}", 64) == slice(0, 64)
        assert UNKNOWN.find_rows(f"blocks.31.{module}", 64) == slice(64, 64)


def test_some_down_projections_are_sensitive() -> None:
    rows = [RULE.find_rows(f"blocks.{i}.mlp.experts.3.down", 64) for i in range(32)]
    sensitive = [i for i, each in enumerate(rows) if each == slice(0, 64)]
    assert sensitive == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert all(each == slice(64, 64) for i, each in enumerate(rows) if i not in sensitive)


def test_others_are_not() -> None:
    assert RULE.find_rows("head", 99) == slice(99, 99)


def test_whole_matrices_with_values_and_the_last_layer() -> None:
    whole = ("blocks.0.attention.qkv", "blocks.7.attention.latents", "blocks.31.mlp.up", "blocks.31.mlp.down")
    assert all(RULE.has_values_or_ends(path, 1024) for path in whole)
    others = ("blocks.0.mlp.down", "blocks.3.attention.out", "blocks.30.mlp.up", "head")
    assert not any(RULE.has_values_or_ends(path, 1024) for path in others)
