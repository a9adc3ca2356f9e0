"""The layers of models. Each layer reads its own part of the checkpoint when it is created."""
