"""Weights of speculators, which are checked while they are read: a damaged speculator would only be slow."""

import torch

from tgis.shard.checkpoint.tensors import Stored, WeightsError, read_pieces
from tgis.shard.checkpoint.weights import Weights

_PIECE = 1 << 22  # approximate number of weights checked at a time


class FiniteWeights(Weights):
    """`Weights` that refuse tensors with infinite values or NaN."""

    def find(self, path: str, shape: tuple[int, ...]) -> Stored:
        stored = super().find(path, shape)
        pieces = [stored.read()] if len(shape) == 1 else (piece for _, piece in read_pieces(stored, _PIECE))
        if not all(bool(torch.isfinite(piece).all()) for piece in pieces):
            raise WeightsError(f"{stored.label} has values that are not finite")
        return stored
