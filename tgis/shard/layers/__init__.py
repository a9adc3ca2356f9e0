"""The layers models are built of; each reads its own part of the checkpoint when it is made."""
