"""`python -m benchmarks.growth`, by a small run of it, and the slopes that it tells."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.growth import read, slope

ROOT = Path(__file__).parents[1]


def test_a_slope_is_the_exponent_of_growth():
    """What does not grow has slope 0, what grows as the models do 1, and as their square 2; one point has none."""
    sizes = (10, 100, 1000)
    assert slope(dict.fromkeys(sizes, 5.0)) == pytest.approx(0)
    assert slope({size: 0.1 * size for size in sizes}) == pytest.approx(1)
    assert slope({size: float(size**2) for size in sizes}) == pytest.approx(2)
    assert slope({10: 3.0}) == 0


@pytest.mark.long
def test_parts_measured_one_after_another_are_saved_together(tmp_path):
    """Three runs of a part each leave one file, with a value for each size of each curve."""
    file = tmp_path / "growth.json"
    for part in ("load", "limiter", "waiting"):
        words = ["--quick", "--only", part, "--sizes", "4", "2", "--waiting", "4", "2", "--save", str(file)]
        subprocess.run([sys.executable, "-m", "benchmarks.growth", *words], cwd=ROOT, check=True, capture_output=True)

    (curves,) = read(file).values()

    assert {curve.partition(": ")[0] for curve in curves} == {"load", "limiter", "waiting"}
    assert all([*points] == [2, 4] and min(points.values()) > 0 for points in curves.values())
