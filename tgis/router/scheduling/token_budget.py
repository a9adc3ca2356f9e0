"""Token budget: decides how many prompt tokens a step may compute in addition to decoding sequences. It
limits the step's duration, which it predicts from earlier steps, so that decoding sequences do not wait too
long."""

MIN_PROMPT_TOKENS = 16  # minimum for a long prompt in any step, so that it always advances
DECAY = 0.98  # factor by which each observation reduces the weight of earlier ones
# A step is considered hanging after MIN_TIMEOUT_S or TIMEOUT_FACTOR times its predicted time, whichever is
# longer.
MIN_TIMEOUT_S = 10.0
TIMEOUT_FACTOR = 10


class TokenBudget:
    """Linear model of step times: seconds = fixed + per_token * num_tokens, fitted by least squares with
    exponential decay, so that recent steps have more weight."""

    def __init__(self, max_tokens: int, decode_step_s: float) -> None:
        self._max_tokens = max_tokens
        self._decode_step_s = decode_step_s
        self._largest = 0  # number of tokens of the largest step so far
        self._weight = self._n = self._nn = self._t = self._nt = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        self._largest = max(self._largest, num_tokens)
        sums = (self._weight, self._n, self._nn, self._t, self._nt)
        added = (1.0, num_tokens, num_tokens**2, seconds, num_tokens * seconds)
        self._weight, self._n, self._nn, self._t, self._nt = (
            total * DECAY + value for total, value in zip(sums, added, strict=True)
        )

    def predict(self, num_tokens: int) -> float:
        """Return the predicted seconds of a step; 0 before the first observation."""
        fixed, per_token = self._fit()
        return fixed + per_token * num_tokens

    def timeout(self, num_tokens: int) -> float:
        """Return the seconds after which a step of that size is considered hanging; 0 if unknown."""
        if not self._largest:
            return 0.0
        # For a step larger than any so far, assume the time per token of the largest one, which is an upper
        # bound.
        known = min(num_tokens, self._largest)
        return max(MIN_TIMEOUT_S, TIMEOUT_FACTOR * self.predict(known) * num_tokens / known)

    def prompt_tokens(self, num_decoding: int, num_prompts: int) -> int:
        """Return the whole budget if no sequence is decoding, else the tokens that fit into the time limit,
        but at least MIN_PROMPT_TOKENS.

        Each waiting or partly computed prompt gets as much time as the decoding sequences take. So one prompt
        makes a step twice as long, and with many prompts none waits long."""
        room = self._max_tokens - num_decoding
        if num_decoding:
            fixed, per_token = self._fit()
            if per_token > 0:
                decode_s = fixed + per_token * num_decoding
                seconds = min(self._decode_step_s, (1 + num_prompts) * decode_s)
                room = min(room, int((seconds - fixed) / per_token) - num_decoding)
        return max(room, MIN_PROMPT_TOKENS)

    def _fit(self) -> tuple[float, float]:
        """Return the fixed seconds and the seconds per token, neither negative."""
        if not self._n:
            return 0.0, 0.0
        spread = self._weight * self._nn - self._n**2
        if spread <= 1e-9 * self._nn * self._weight:  # all steps had one size
            return 0.0, self._t / self._n
        per_token = max((self._weight * self._nt - self._n * self._t) / spread, 0.0)
        fixed = max((self._t - per_token * self._n) / self._weight, 0.0)
        return (fixed, per_token) if fixed else (0.0, self._nt / self._nn)
