"""One line for each way that a family's checkpoints come: its name, and transformers' configuration of a tiny
one. The tests write it to disk with random weights and compare."""
