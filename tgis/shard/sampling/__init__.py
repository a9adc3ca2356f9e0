"""Samples tokens from logits: filters, random numbers, logprobs and grammars."""
