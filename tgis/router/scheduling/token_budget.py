"""How many prompt tokens a step may compute beside the sequences that decode: as many as fit into a time that
those can wait, predicted from the steps before."""

MIN_PROMPT_TOKENS = 16  # what a long prompt gets of any step, so that it always comes forward
FORGET = 0.98  # weight that an observation keeps with each further one
MIN_TIMEOUT_S, PATIENCE = 10.0, 10
"""A step that takes longer, and as many times longer than predicted, will never end."""


class StepBudget:
    """Fits seconds = fixed + per_token * num_tokens to the answered steps, recent ones weighing more (least
    squares with exponential forgetting)."""

    def __init__(self, max_tokens: int, decode_step_s: float) -> None:
        self._max_tokens, self._decode_step_s = max_tokens, decode_step_s
        self._largest = 0  # tokens of a step so far
        self._weight = self._n = self._nn = self._t = self._nt = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of that many tokens took that long."""
        self._largest = max(self._largest, num_tokens)
        sums = (self._weight, self._n, self._nn, self._t, self._nt)
        added = (1.0, num_tokens, num_tokens**2, seconds, num_tokens * seconds)
        self._weight, self._n, self._nn, self._t, self._nt = (
            total * FORGET + value for total, value in zip(sums, added, strict=True)
        )

    def predict(self, num_tokens: int) -> float:
        """Seconds; 0 before anything was observed."""
        fixed, per_token = self._fit()
        return fixed + per_token * num_tokens

    def timeout(self, num_tokens: int) -> float:
        """Seconds after which a step of so many tokens will never end; 0 where that cannot be told."""
        if not self._largest:
            return 0.0
        # What is known of smaller steps says little of a larger one, but that it takes no more per token.
        known = min(num_tokens, self._largest)
        return max(MIN_TIMEOUT_S, PATIENCE * self.predict(known) * num_tokens / known)

    def prompt_tokens(self, num_decoding: int, num_prompts: int) -> int:
        """The whole budget while nobody decodes, else what fits into the time; never less than a small
        chunk.

        Each prompt that waits, or is computed in part, is given as much time as those that decode take: one
        makes their steps twice as long, and of many none waits long."""
        room = self._max_tokens - num_decoding
        if num_decoding:
            fixed, per_token = self._fit()
            if per_token > 0:
                decode_s = fixed + per_token * num_decoding
                seconds = min(self._decode_step_s, (1 + num_prompts) * decode_s)
                room = min(room, int((seconds - fixed) / per_token) - num_decoding)
        return max(room, MIN_PROMPT_TOKENS)

    def _fit(self) -> tuple[float, float]:
        """Fixed seconds and seconds per token, neither below zero."""
        if not self._n:
            return 0.0, 0.0
        spread = self._weight * self._nn - self._n**2
        if spread <= 1e-9 * self._nn * self._weight:  # all steps were of one size
            return 0.0, self._t / self._n
        per_token = max((self._weight * self._nt - self._n * self._t) / spread, 0.0)
        fixed = max((self._t - per_token * self._n) / self._weight, 0.0)
        return (fixed, per_token) if fixed else (0.0, self._nt / self._nn)
