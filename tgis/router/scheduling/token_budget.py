"""Token budget: decides how many prompt tokens a step may compute in addition to decoding sequences. It
limits the step's duration, which it predicts from earlier steps, so that decoding sequences do not wait too
long."""

from tgis.router.scheduling.linear_fit import LinearFit

MIN_PROMPT_TOKENS = 16  # minimum for a long prompt in any step, so that it always advances
DECAY = 0.98  # factor by which each observation reduces the weight of earlier ones
# A step is considered hanging after MIN_TIMEOUT_S or TIMEOUT_FACTOR times its predicted time, whichever is
# longer.
MIN_TIMEOUT_S = 10.0
TIMEOUT_FACTOR = 10


class TokenBudget:
    """Model of step times, which are linear in the number of tokens, and the budget that follows from it."""

    def __init__(self, max_tokens: int, decode_step_s: float) -> None:
        self._max_tokens = max_tokens
        self._decode_step_s = decode_step_s
        self._largest = 0  # number of tokens of the largest step so far
        self._times = LinearFit(DECAY)

    def observe(self, num_tokens: int, seconds: float) -> None:
        self._largest = max(self._largest, num_tokens)
        self._times.observe(num_tokens, seconds)

    def predict(self, num_tokens: int) -> float:
        """Return the predicted seconds of a step; 0 before the first observation."""
        fixed, per_token = self._times.solve()
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
            fixed, per_token = self._times.solve()
            if per_token > 0:
                decode_s = fixed + per_token * num_decoding
                seconds = min(self._decode_step_s, (1 + num_prompts) * decode_s)
                room = min(room, int((seconds - fixed) / per_token) - num_decoding)
        return max(room, MIN_PROMPT_TOKENS)
