"""Settings of a run, and their form in the quantized checkpoint."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal, Self

from tgis.errors import OperatorError

Method = Literal["gptq", "fp8", "int8"]

SMALL_MODEL = 10**9  # models with fewer weights lose more by quantization, so their groups are smaller
SMALL_GROUP, LARGE_GROUP = 32, 128
SENSITIVE_BITS = 8
SENSITIVE_GROUPS = (128, 64)  # sizes that are tried; with 8 bits, larger groups lose little


class QuantizeError(OperatorError):
    """Error: the checkpoint cannot be quantized. The text is one line with the cause and the remedy."""


@dataclass(frozen=True, kw_only=True)
class QuantizeSettings:
    """Settings of a run. All except `method` apply to GPTQ."""

    method: Method = "gptq"
    bits: int = 4
    sensitive_bits: int | None = None  # of matrices that lose most; None: by the model's size
    group_size: int | None = None  # adjacent columns that share a scale; -1: all; None: by the model's size
    sensitive_group_size: int | None = None  # the same for sensitive matrices
    act_order: bool = False  # round the columns with the largest inputs first
    sym: bool = False  # the zero is the middle of the codes' range
    percdamp: float = 0.01  # fraction of the Hessian's mean diagonal that is added to the diagonal
    samples: int = 128
    seqlen: int = 2048  # tokens per sample, limited by the model's length
    seed: int = 0

    def for_model(self, num_weights: int, sensitive_widths: Iterable[int] = ()) -> Self:
        """Return the settings with group sizes and with the bits of sensitive matrices for a model of this
        number of quantized weights. `sensitive_widths` has the columns of the sensitive matrices."""
        is_small = num_weights < SMALL_MODEL
        group_size = self.group_size or (SMALL_GROUP if is_small else LARGE_GROUP)
        bits = self.sensitive_bits or (SENSITIVE_BITS if is_small and self.bits == 4 else self.bits)
        own = group_size
        if self.group_size is None and bits == SENSITIVE_BITS:
            shared = gcd(*sensitive_widths)
            own = next((each for each in SENSITIVE_GROUPS if shared and shared % each == 0), group_size)
        return replace(self, group_size=group_size, sensitive_bits=bits, sensitive_group_size=own)

    def for_matrix(self, is_sensitive: bool) -> Self:
        """Return the settings with the bits and the group size of a matrix."""
        if not is_sensitive:
            return self
        bits, group_size = self.sensitive_bits or self.bits, self.sensitive_group_size or self.group_size
        return replace(self, bits=bits, group_size=group_size)

    def group_length(self, num_columns: int) -> int:
        assert self.group_size is not None, "for_model chooses it"
        return num_columns if self.group_size == -1 else min(self.group_size, num_columns)

    def describe(self, kept: list[str], sensitive: list[str]) -> dict[str, Any]:
        """Return `quantization_config`. `kept` lists linear modules that are not quantized, `sensitive` has
        regular expressions for the names of sensitive modules."""
        if self.method != "gptq":
            return _describe_rows(self.method, kept)
        own = self.for_matrix(True)
        described = {"bits": own.bits, "group_size": own.group_size}
        differs = described != {"bits": self.bits, "group_size": self.group_size}
        dynamic = {f"+:{name}": described for name in sensitive}
        return {
            **({"dynamic": dynamic} if differs and dynamic else {}),
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
    """Return the `quantization_config` of compressed-tensors for 8 bits with a scale per row.

    Servers with matching kernels also quantize activations, token by token."""
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
