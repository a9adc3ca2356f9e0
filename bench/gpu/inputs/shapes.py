"""Lists the sizes of the measured models."""

from bench.shapes import SHAPES as SMALL_SHAPES
from bench.shapes import Shape

SHAPES = {
    "8b": Shape(32, 4096, 32, 8, 128, 14336, 128256, tie_embeddings=False, max_length=16384),
    "1b": SMALL_SHAPES["1b"],
    "0.6b": Shape(28, 1024, 16, 8, 128, 3072, 151936, max_length=16384),
}
TINY = Shape(2, 64, 4, 2, 16, 128, 512, tie_embeddings=False, max_length=512)
