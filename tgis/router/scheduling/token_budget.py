"""Token budget: decides how many prompt tokens a step may compute beside the sequences that decode. The step
should take no longer than those can wait; its time is predicted from earlier steps."""

MIN_PROMPT_TOKENS = 16  # minimum for a long prompt in any step, so that it always advances
FORGET = 0.98  # factor of an observation's weight for each later observation
# A step is taken never to end after MIN_TIMEOUT_S or PATIENCE times its predicted time, if that is more.
MIN_TIMEOUT_S, PATIENCE = 10.0, 10


class TokenBudget:
    """Linear model of step times: seconds = fixed + per_token * num_tokens, fitted by least squares with
    exponential forgetting, so that recent steps weigh more."""

    def __init__(self, max_tokens: int, decode_step_s: float) -> None:
        self._max_tokens, self._decode_step_s = max_tokens, decode_step_s
        self._largest = 0  # most tokens of a step so far
        self._weight = self._n = self._nn = self._t = self._nt = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        self._largest = max(self._largest, num_tokens)
        sums = (self._weight, self._n, self._nn, self._t, self._nt)
        added = (1.0, num_tokens, num_tokens**2, seconds, num_tokens * seconds)
        self._weight, self._n, self._nn, self._t, self._nt = (
            total * FORGET + value for total, value in zip(sums, added, strict=True)
        )

    def predict(self, num_tokens: int) -> float:
        """Return the predicted seconds of a step; 0 before the first observation."""
        fixed, per_token = self._fit()
        return fixed + per_token * num_tokens

    def timeout(self, num_tokens: int) -> float:
        """Return the seconds after which a step of that size is taken never to end; 0 if unknown."""
        if not self._largest:
            return 0.0
        # Smaller steps tell little about a larger one, except that it takes no more time per token.
        known = min(num_tokens, self._largest)
        return max(MIN_TIMEOUT_S, PATIENCE * self.predict(known) * num_tokens / known)

    def prompt_tokens(self, num_decoding: int, num_prompts: int) -> int:
        """Return the whole budget while no sequence decodes, and else the tokens that fit into the time
        limit; never fewer than MIN_PROMPT_TOKENS.

        Each prompt that waits, or is computed in part, gets as much time as the sequences that decode take.
        One prompt makes their steps twice as long, and with many prompts none waits long."""
        room = self._max_tokens - num_decoding
        if num_decoding:
            fixed, per_token = self._fit()
            if per_token > 0:
                decode_s = fixed + per_token * num_decoding
                seconds = min(self._decode_step_s, (1 + num_prompts) * decode_s)
                room = min(room, int((seconds - fixed) / per_token) - num_decoding)
        return max(room, MIN_PROMPT_TOKENS)

    def _fit(self) -> tuple[float, float]:
        """Return fixed seconds and seconds per token, neither below zero."""
        if not self._n:
            return 0.0, 0.0
        spread = self._weight * self._nn - self._n**2
        if spread <= 1e-9 * self._nn * self._weight:  # all steps had one size
            return 0.0, self._t / self._n
        per_token = max((self._weight * self._nt - self._n * self._t) / spread, 0.0)
        fixed = max((self._t - per_token * self._n) / self._weight, 0.0)
        return (fixed, per_token) if fixed else (0.0, self._nt / self._nn)
