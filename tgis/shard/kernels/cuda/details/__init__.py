"""Token details of GPUs: log-probabilities, ranks and top tokens, without sorting the vocabulary."""
