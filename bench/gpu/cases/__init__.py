"""Contains the functions of the cases of `python -m bench.gpu`."""
