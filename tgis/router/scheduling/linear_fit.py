"""Least-squares fit of durations."""


class LinearFit:
    """Linear model: seconds = fixed + per_unit * num_units, fitted by least squares with exponential decay,
    so that recent observations have more weight."""

    def __init__(self, decay: float) -> None:
        """Create a fit. `decay` is the factor by which each observation reduces the weight of earlier
        ones."""
        self._decay = decay
        self._weight = self._n = self._nn = self._t = self._nt = 0.0
        self._solution: tuple[float, float] | None = 0.0, 0.0  # None after an observation

    @property
    def is_empty(self) -> bool:
        return not self._n

    def observe(self, num_units: int, seconds: float) -> None:
        decay = self._decay
        self._weight = self._weight * decay + 1.0
        self._n = self._n * decay + num_units
        self._nn = self._nn * decay + num_units**2
        self._t = self._t * decay + seconds
        self._nt = self._nt * decay + num_units * seconds
        self._solution = None

    def solve(self) -> tuple[float, float]:
        """Return the fixed seconds and the seconds per unit, neither negative; 0 before the first
        observation."""
        if self._solution is None:
            self._solution = self._solve()
        return self._solution

    def _solve(self) -> tuple[float, float]:
        if not self._n:
            return 0.0, 0.0
        spread = self._weight * self._nn - self._n**2
        if spread <= 1e-9 * self._nn * self._weight:  # all observations had one size
            return 0.0, self._t / self._n
        per_unit = max((self._weight * self._nt - self._n * self._t) / spread, 0.0)
        fixed = max((self._t - per_unit * self._n) / self._weight, 0.0)
        return (fixed, per_unit) if fixed else (0.0, self._nt / self._nn)
