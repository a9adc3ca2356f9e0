"""Kernels of recurrent layers.

Sums advance by whole chunks of CHUNK tokens, which begin at fixed positions of a sequence. The inputs of the
tokens after the last whole chunk are pending: they are stored beside the sums, and every later step of the
chunk computes with them. So a token's bits depend only on the tokens before it: not on the step, on the cut
of the prompt, or on the other sequences, and a generated token has the bits that it would have in a
prompt."""
