"""Settings of a run that makes a quantized checkpoint, and how they are written in it."""

from dataclasses import dataclass
from typing import Any, Literal

from tgis.errors import OperatorError

Method = Literal["gptq", "fp8", "int8"]


class QuantizeError(OperatorError):
    """Error: the checkpoint cannot be made. Its text is one line that says why, and what to do."""


@dataclass(frozen=True, kw_only=True)
class QuantizeSettings:
    """Settings of one run. All but `method` are GPTQ's."""

    method: Method = "gptq"
    bits: int = 4
    group_size: int = 128  # adjacent columns that share a scale; -1: all
    act_order: bool = False  # round the columns with the largest inputs first
    sym: bool = True  # codes are symmetric around the middle of their range
    percdamp: float = 0.01  # share of the Hessian's mean diagonal that is added to it
    samples: int = 128
    seqlen: int = 2048  # tokens of a sample, if the model takes so many
    seed: int = 0

    def group_length(self, num_columns: int) -> int:
        return num_columns if self.group_size == -1 else min(self.group_size, num_columns)

    def describe(self, kept: list[str]) -> dict[str, Any]:
        """Return `quantization_config`; `kept` are linear modules that are not quantized."""
        if self.method != "gptq":
            return _describe_rows(self.method, kept)
        return {
            "quant_method": "gptq",
            "checkpoint_format": "gptq",
            "bits": self.bits,
            "group_size": self.group_size,
            "desc_act": self.act_order,
            "static_groups": self.act_order,
            "sym": self.sym,
            "damp_percent": self.percdamp,
        }


def _describe_rows(method: Method, kept: list[str]) -> dict[str, Any]:
    """Return the `quantization_config` of compressed-tensors for 8 bits with a scale for each row.

    Servers that have such products also quantize activations, token by token."""
    kind = {"fp8": "float", "int8": "int"}[method]
    shared = {"num_bits": 8, "type": kind, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "ignore": kept,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**shared, "strategy": "channel", "dynamic": False},
                "input_activations": {**shared, "strategy": "token", "dynamic": True},
            }
        },
    }
