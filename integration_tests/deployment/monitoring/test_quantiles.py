"""The quantiles of `tgis top` against histogram_quantile."""

import math
import random
from itertools import accumulate
from pathlib import Path

import pytest
import yaml

from scripts.prometheus import promtool as run_promtool
from tgis.cli.top.rates import quantile_of

pytestmark = pytest.mark.deploy
NUM_CASES = 200
TOLERANCE = 1e-9


def test_quantiles_are_those_of_prometheus(promtool: Path, tmp_path: Path) -> None:
    r = random.Random(11)
    series, tests = [], []
    for case in range(NUM_CASES):
        buckets = random_buckets(r)
        q = r.choice((0.01, 0.5, 0.95, 0.99, 1.0, r.uniform(0.001, 1)))
        for end, count in buckets:
            le = "+Inf" if math.isinf(end) else repr(end)
            series.append({"series": f'h_bucket{{case="{case}", le="{le}"}}', "values": repr(count)})
        tests.append((f'histogram_quantile({q!r}, h_bucket{{case="{case}"}})', case, quantile_of(q, buckets)))
    assert check_rules(tmp_path, series, tests) == 0
    name, case, value = next(one for one in tests if one[2])
    assert check_rules(tmp_path, series, [(name, case, value * 1.001)]) != 0


def random_buckets(r: random.Random) -> list[tuple[float, float]]:
    ends = [*accumulate(r.uniform(0.001, 2) for _ in range(r.randint(1, 8))), math.inf]
    counts = accumulate(r.choice((0, 0, 1, r.randint(1, 40))) for _ in ends)
    return list(zip(ends, map(float, counts), strict=True))


def check_rules(
    directory: Path, series: list[dict[str, str]], tests: list[tuple[str, int, float | None]]
) -> int:
    """Return promtool's exit status for expressions, their cases and values; None means NaN."""
    checks = []
    for expression, case, value in tests:
        same = (
            f"abs({expression} - {value!r}) < bool {TOLERANCE}"
            if value is not None
            else f"{expression} != bool {expression}"
        )
        samples = [{"labels": f'{{case="{case}"}}', "value": 1}]
        checks.append({"expr": same, "eval_time": "0m", "exp_samples": samples})
    file = directory / "test.yaml"
    (directory / "rules.yaml").write_text("groups: []\n")
    group = {"interval": "1m", "input_series": series, "promql_expr_test": checks}
    file.write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": [group]}))
    done = run_promtool("test", "rules", file)
    print(done.stdout[-3000:])
    return done.returncode
