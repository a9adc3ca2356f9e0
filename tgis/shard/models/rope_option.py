"""Rotary scaling set by --rope-scaling and --rope-factor, for models whose configuration has none."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tgis.config.model import ModelOptions
from tgis.hub.model_files import length_of_model
from tgis.shard.layers.rotary import DynamicScaling, LinearScaling, Rope, Scaling
from tgis.shard.models.config_reader import section
from tgis.shard.models.interface import ModelSpec, UnsupportedModelError
from tgis.shard.models.spec import DecoderSpec

FULL_ATTENTION = "full_attention"


class RopeOptionError(UnsupportedModelError):
    """Error: the model does not support the requested rotary scaling."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"--rope-scaling and --rope-factor do not apply to this model: {reason}")


NO_ROPE = "the model has no rotary positions"


@dataclass(frozen=True)
class RopeOption:
    kind: str
    """linear or dynamic."""
    factor: float

    def scale_spec(self, spec: ModelSpec, config: Mapping[str, Any]) -> DecoderSpec:
        """Return `spec`, which `config` describes, with this scaling. Raises RopeOptionError."""
        if not isinstance(spec, DecoderSpec) or spec.rope is None:
            raise RopeOptionError(NO_ROPE)
        scaling = self._scaling(config)
        if spec.rope.scaling == scaling:
            return spec
        if spec.rope.scaling is not None:
            raise RopeOptionError("the model's configuration already has another scaling")
        rope, *layer_ropes = (
            each and Rope(each.dim, each.theta, scaling) for each in (spec.rope, *spec.layer_ropes)
        )
        return replace(spec, rope=rope, layer_ropes=tuple(layer_ropes))

    def scale_parsed(self, parsed: Any) -> None:
        """Set this scaling in a configuration of transformers. Raises RopeOptionError."""
        given = getattr(parsed.get_text_config(decoder=True), "rope_parameters", None) or {}
        if any(isinstance(value, Mapping) for value in given.values()):
            given = given.get(FULL_ATTENTION) or {}  # layers with a window need no scaling
        if not given:
            raise RopeOptionError(NO_ROPE)
        requested = {"rope_type": self.kind, "factor": self.factor}
        if given.get("rope_type", "default") != "default" and not requested.items() <= given.items():
            raise RopeOptionError("the model's configuration already has another scaling")
        given.update(requested)

    def _scaling(self, config: Mapping[str, Any]) -> Scaling:
        if self.kind == "linear":
            return LinearScaling(self.factor)
        length = length_of_model({**config, **section(config, "text_config")})
        if length is None:
            raise RopeOptionError("dynamic needs the model's length, which its configuration does not have")
        return DynamicScaling(self.factor, length)


def read_rope_option(options: ModelOptions) -> RopeOption | None:
    """Return the scaling that the options set, or None if they set none or one without effect."""
    kind = options.rope_scaling or "linear"
    factor = options.rope_factor or 1.0
    is_given = options.rope_scaling is not None or options.rope_factor is not None
    return RopeOption(kind, factor) if is_given and (kind, factor) != ("linear", 1.0) else None
