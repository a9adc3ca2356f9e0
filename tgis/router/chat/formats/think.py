"""Reasoning of Qwen 3, QwQ and DeepSeek."""

from tgis.router.chat.formats.types import ReasoningFormat

THINK = ReasoningFormat(
    "think",
    "<think>",
    "</think>",
    in_template=("</think>",),
    other_names=("qwen3", "deepseek_r1", "deepseek_v3"),
)
