"""One case for each form of a family's checkpoints: its name, and transformers' configuration of a tiny
model. The tests write it to disk with random weights and compare results."""
