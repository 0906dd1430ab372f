"""Two checkouts side by side: whose turn it is, what is missed, and what the table says."""

from __future__ import annotations

import argparse
import json
import os
import sys

import pytest

from benchmarks.against import (
    AGAIN,
    BASE,
    THIS,
    Limit,
    Row,
    add_arguments,
    append,
    environments,
    order,
    quartiles,
    report,
    result_rows,
    unfit,
    version,
)

QUIET = [0.99, 1.0, 1.0, 1.0, 1.01]  # the baseline to itself: quartiles 1 and 1
NOISY = [0.9, 0.95, 1.0, 1.05, 1.1]  # 0.95 and 1.05
COST, RATE = Limit(most=True, ratio=1.03), Limit(most=False, ratio=0.95)


def asked(*words):
    """What the command line says."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    return parser.parse_args(words)


def checkout(folder, *, compiled):
    """A checkout whose mme only tells its version."""
    program = folder / ".venv" / "bin" / "mme"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!{sys.executable}\nprint('mme 0.1.0{', compiled' if compiled else ''}')\n")
    program.chmod(0o755)
    return folder


def measured(base, this, again, judged="cost"):
    """A row whose servers each had a value in each turn."""
    return Row("binary", "processor time an answer", "µs", "", judged, {BASE: base, THIS: this, AGAIN: again})


@pytest.mark.parametrize(
    ("values", "expected"),
    [([3.0], (3, 3, 3)), ([1.0, 2.0], (1.25, 1.5, 1.75)), ([5.0, 1.0, 3.0, 2.0, 4.0], (2, 3, 4))],
)
def test_quartiles_are_interpolated_and_take_values_in_any_order(values, expected):
    """Of one value all three are that value."""
    assert quartiles(values) == expected


def test_every_other_turn_goes_backwards():
    """The baseline's servers change places around this checkout's, which stays between them."""
    assert list(order([BASE, THIS, AGAIN], 3)) == [BASE, THIS, AGAIN, AGAIN, THIS, BASE, BASE, THIS, AGAIN]


@pytest.mark.parametrize(
    ("limit", "ratio", "noise", "verdict"),
    [
        (COST, 1.03, QUIET, "ok"),
        (COST, 0.5, QUIET, "ok"),
        (COST, 1.031, QUIET, "missed"),
        (COST, 1.10, NOISY, "within noise"),
        (COST, 1.14, NOISY, "missed"),
        (RATE, 0.95, QUIET, "ok"),
        (RATE, 1.5, QUIET, "ok"),
        (RATE, 0.949, QUIET, "missed"),
        (RATE, 0.90, NOISY, "within noise"),
        (RATE, 0.84, NOISY, "missed"),
    ],
)
def test_a_limit_is_missed_by_more_than_the_noise(limit, ratio, noise, verdict):
    """The noise is the quartile range of the baseline to itself; a cost is limited above, a rate below."""
    assert limit.verdict([ratio], noise) == verdict


def test_the_median_turn_decides():
    """One slow turn of five does not miss a limit."""
    assert COST.verdict([1.0, 1.0, 1.0, 1.0, 9.0], QUIET) == "ok"


def test_ratios_are_taken_within_a_turn():
    """A machine that slows down to a half changes no ratio."""
    row = measured([10.0, 20.0], [11.0, 22.0], [10.0, 20.0])
    assert row.ratios(THIS, BASE) == pytest.approx([1.1, 1.1])
    assert row.ratios("Triton", BASE) == []


def test_each_figure_of_a_result_has_its_row():
    """What one turn measured is appended to the rows in their order; the rate and the processor time are judged."""
    rows = result_rows("binary")
    append(rows, BASE, (1000.0, 0.5, 2.0, 60.0))
    append(rows, BASE, (1001.0, 0.6, 2.1, 61.0))
    assert [row.values[BASE] for row in rows] == [[1000, 1001], [0.5, 0.6], [2, 2.1], [60, 61]]
    assert [row.judged for row in rows] == ["rate", "", "", "cost"]


def test_the_report_is_a_table_and_fails_where_a_limit_is_missed(tmp_path, capsys):
    """The last column says so, the exit status too; the values of every turn go into the file."""
    arguments = asked("--against", str(checkout(tmp_path / "base", compiled=True)), "--pairs", "2")
    slower = measured([100.0, 100.0], [110.0, 110.0], [100.0, 100.0])
    latency = Row("binary", "p50", "ms", values={BASE: [1.0], THIS: [2.0], AGAIN: [1.0]})
    file = tmp_path / "rows.json"
    assert report([slower, latency], arguments, file) == 1
    printed = capsys.readouterr().out
    assert (
        "| binary | processor time an answer, µs | 100 (100 to 100) | 110 (110 to 110) "
        "| 1.100 (1.100 to 1.100) | 1.000 (1.000 to 1.000) | ≤ 1.03 | missed |" in printed
    )
    assert "|  | p50, ms | 1 (1 to 1) | 2 (2 to 2) | 2.000" in printed
    assert "Missed: binary: processor time an answer." in printed
    assert json.loads(file.read_text())[0]["values"][THIS] == [110, 110]
    assert report([slower], asked("--against", str(tmp_path / "base"), "--limit-cpu", "1.1")) == 0


def test_a_baseline_that_is_not_installed_is_refused(tmp_path):
    """The sentence says what to run."""
    with pytest.raises(SystemExit, match="run `make install` in that checkout"):
        environments(asked("--against", str(tmp_path)))


def test_a_baseline_that_is_not_compiled_is_refused_unless_asked_for(tmp_path):
    """By --uncompiled it is started, twice, from its own environment."""
    base = checkout(tmp_path, compiled=False)
    with pytest.raises(SystemExit, match="is not compiled: run `make compiled` there"):
        environments(asked("--against", str(base)))
    commands = environments(asked("--against", str(base), "--uncompiled"))
    assert list(commands) == [BASE, THIS, AGAIN]
    assert commands[BASE] == commands[AGAIN] == base / ".venv" / "bin"


def test_a_baseline_that_was_edited_since_it_was_compiled_is_refused(tmp_path):
    """What would be measured is the module as it was; sources that are not compiled may be newer."""
    base = checkout(tmp_path, compiled=True)
    package = base / "serve" / "models"
    package.mkdir(parents=True)
    for name in ("model.cpython-311-x86_64-linux-gnu.so", "model.py", "plain.py"):
        (package / name).touch()
    os.utime(package / "model.py", (0, 0))
    os.utime(package / "model.cpython-311-x86_64-linux-gnu.so", (1, 1))
    assert unfit(base / ".venv" / "bin") == ""
    os.utime(package / "model.py", (2, 2))
    with pytest.raises(SystemExit, match="was edited after it was compiled: run `make compiled`"):
        environments(asked("--against", str(base)))


def test_the_version_is_that_of_the_checkout_whatever_python_is_to_import(tmp_path, monkeypatch):
    """PYTHONPATH would have another checkout's mme import this one's modules: it is not passed on."""
    program = checkout(tmp_path, compiled=True) / ".venv" / "bin" / "mme"
    program.write_text(f"#!{sys.executable}\nimport os\nprint(os.environ.get('PYTHONPATH', 'its own'))\n")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    assert version(program.parent) == "its own"
