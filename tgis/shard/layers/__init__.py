"""The layers models are built of. Each reads its own part of the checkpoint when it is made and is complete
then."""
