"""Token details that a device computes, of sampled tokens and of prompts."""
