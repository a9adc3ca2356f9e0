"""API of DJL Serving's LMI containers, which SageMaker calls."""
