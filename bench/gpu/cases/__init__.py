"""Functions of the cases of `python -m bench.gpu`."""
