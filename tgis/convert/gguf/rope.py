"""Converts the parameters of rotary embeddings in GGUF files to those of config.json."""

from math import log, nextafter, sqrt
from typing import Any

import numpy as np

from tgis.convert.gguf.files import GgufFiles
from tgis.convert.gguf.metadata import show
from tgis.convert.gguf.tensor_names import ROPE_FREQUENCIES, ROPE_LONG, ROPE_SHORT

DEFAULT_THETA = 10000.0
UNROTATED = 1e20  # factors above it leave no angle that float32 resolves at any position


def read_rope(files: GgufFiles, head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters`. Raises ConversionError."""
    metadata = files.metadata
    parameters: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": metadata.number(".rope.freq_base", DEFAULT_THETA),
    }
    dim = metadata.integer(".rope.dimension_count", head_dim)
    if dim != head_dim:
        parameters["partial_rotary_factor"] = _share(dim, head_dim)
    if f"{ROPE_FREQUENCIES}.weight" in files:  # one list of factors for all lengths
        factors = _read_factors(files, ROPE_FREQUENCIES)
        return parameters | _long(factors, factors, metadata.integer(".context_length"), 1.0)
    if f"{ROPE_LONG}.weight" in files:
        return parameters | _read_long(files)
    return parameters | read_scaling(files)


def read_scaling(files: GgufFiles) -> dict[str, Any]:
    """Return the scaling of positions in the metadata; empty if there is none. Raises ConversionError."""
    metadata = files.metadata
    if ".rope.scale_linear" in metadata:  # the older key
        return {"rope_type": "linear", "factor": metadata.number(".rope.scale_linear")}
    kind = metadata.text(".rope.scaling.type", "none")
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise metadata.refuse(".rope.scaling.type", f"{show(kind)} is not supported")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": metadata.number(".rope.scaling.factor")}
    if kind == "yarn":
        length = metadata.integer(
            ".rope.scaling.original_context_length", metadata.integer(".context_length")
        )
        scaling["original_max_position_embeddings"] = length
        for key, name in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if f".rope.scaling.{name}" in metadata:
                scaling[key] = metadata.number(f".rope.scaling.{name}")
    return scaling


def read_proportional(files: GgufFiles, theta: float) -> dict[str, Any]:
    """Return the parameters of a rotary embedding whose last channels are not rotated. In the file, their
    frequencies are divided by a number that makes them about 0. Raises ConversionError."""
    factors = _read_factors(files, ROPE_FREQUENCIES)
    num_rotated = sum(factor == 1 for factor in factors)
    is_rotated = [factor == 1 for factor in factors if factor == 1 or factor > UNROTATED]
    if not num_rotated or is_rotated != [i < num_rotated for i in range(len(factors))]:
        shown = ", ".join(f"{factor:g}" for factor in factors[:4])
        raise files.metadata.refuse(
            ".rope.freq_base", f"has the factors {shown} ..., which are not supported"
        )
    return {
        "rope_type": "proportional",
        "rope_theta": theta,
        "partial_rotary_factor": num_rotated / len(factors),
    }


def _read_long(files: GgufFiles) -> dict[str, Any]:
    metadata = files.metadata
    max_length = metadata.integer(".context_length")
    length = metadata.integer(".rope.scaling.original_context_length", max_length)
    amplitude = sqrt(1 + log(max(max_length / length, 1)) / log(max(length, 2)))
    amplitude = metadata.number(".rope.scaling.attn_factor", amplitude)
    short, long = (_read_factors(files, name) for name in (ROPE_SHORT, ROPE_LONG))
    return _long(short, long, length, amplitude)


def _long(short: list[float], long: list[float], length: int, amplitude: float) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": length,
        "attention_factor": amplitude,
    }


def _read_factors(files: GgufFiles, name: str) -> list[float]:
    """Return the numbers of a small tensor. Raises ConversionError."""
    tensor = files.tensors.get(f"{name}.weight")
    if tensor is None:
        raise files.metadata.refuse(".rope.scaling.type", f"needs tensor {name}.weight, which is missing")
    if tensor.place.type.name != "F32" or len(tensor.place.shape) != 1:
        raise files.metadata.refuse(".rope.scaling.type", f"needs tensor {name}.weight as a vector of F32")
    with tensor.path.open("rb") as content:
        content.seek(tensor.place.start)
        numbers = np.frombuffer(content.read(tensor.place.num_bytes), dtype="<f4")
    return [float(each) for each in numbers]


def _share(dim: int, head_dim: int) -> float:
    """Return the share of a head's channels for which `int(head_dim * share)` is `dim`."""
    share = dim / head_dim
    return share if int(head_dim * share) == dim else nextafter(share, 1)
