"""Rule that selects the weights that quantization to 4 bits harms most."""

import re
from dataclasses import dataclass

_LAYER = re.compile(r"(?:^|\.)blocks\.(\d+)\.")


@dataclass(frozen=True)
class Sensitivity:
    """Rule for a model of given sizes. Sensitive weights are the value projections, whose errors no softmax
    dampens; the whole last layer, whose errors no later layer corrects; and the down projections of the first
    and last eighth of the layers and of every third layer between, which add large values to the residual
    stream."""

    num_layers: int = 0
    num_value_rows: int = 0  # rows of values in a fused matrix of queries, keys and values, or of latents
    layer_value_rows: tuple[int, ...] = ()  # the same for each layer, if they differ

    def find_rows(self, path: str, num_rows: int) -> slice:
        """Return the sensitive rows of a module's weight: none, all, or the last ones."""
        match = _LAYER.search(path)
        if match is None or not self.num_layers:
            return slice(num_rows, num_rows)
        layer = int(match[1])
        module = path.rpartition(".")[2]
        if layer == self.num_layers - 1 or (module == "down" and self._is_sensitive_down(layer)):
            return slice(0, num_rows)
        own = self.layer_value_rows[layer] if self.layer_value_rows else self.num_value_rows
        count = {"qkv": own, "latents": own, "kv": num_rows // 2}.get(module, 0)
        return slice(num_rows - count, num_rows)

    def has_values_or_ends(self, path: str, num_rows: int) -> bool:
        """Return True for matrices with rows of values, and for those of the last layer. In checkpoints, a
        matrix has one type, also if servers merge it from queries, keys and values."""
        match = _LAYER.search(path)
        if match is not None and int(match[1]) == self.num_layers - 1:
            return True
        return not path.endswith(".down") and self.find_rows(path, num_rows).start < num_rows

    def _is_sensitive_down(self, layer: int) -> bool:
        eighth = self.num_layers // 8
        is_outer = layer < eighth or layer >= self.num_layers - eighth
        return is_outer or (layer - eighth) % 3 == 2


UNKNOWN = Sensitivity()
"""Rule by which no weights are sensitive."""
