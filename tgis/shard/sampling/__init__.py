"""From logits to tokens: filters, random numbers, log-probabilities, grammars."""
