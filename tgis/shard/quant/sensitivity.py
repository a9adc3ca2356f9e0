"""Rule that says which weights of a model lose most when they are rounded to 4 bits."""

import re
from dataclasses import dataclass

_LAYER = re.compile(r"(?:^|\.)blocks\.(\d+)\.")


@dataclass(frozen=True)
class Sensitivity:
    """Sizes of a model that the rule needs. Sensitive are the values of attention, whose errors no softmax
    dampens; all of the last layer, after which nothing makes up for an error; and the down projections of
    the first and the last eighth of the layers and of each third layer between them, which add large numbers
    to the residual stream."""

    num_layers: int = 0
    num_value_rows: int = 0  # of the values in a matrix of queries, keys and values

    def find_rows(self, path: str, num_rows: int) -> slice:
        """Return the sensitive rows of a module's weight, which are the last ones, all or none."""
        found = _LAYER.search(path)
        if found is None or not self.num_layers:
            return slice(num_rows, num_rows)
        layer = int(found[1])
        module = path.rpartition(".")[2]
        if layer == self.num_layers - 1 or (module == "down" and self._is_sensitive_down(layer)):
            return slice(0, num_rows)
        count = {"qkv": self.num_value_rows, "kv": num_rows // 2}.get(module, 0)
        return slice(num_rows - count, num_rows)

    def _is_sensitive_down(self, layer: int) -> bool:
        eighth = self.num_layers // 8
        is_outer = layer < eighth or layer >= self.num_layers - eighth
        return is_outer or (layer - eighth) % 3 == 2


UNKNOWN = Sensitivity()
"""That of a model of which no weights are sensitive."""
