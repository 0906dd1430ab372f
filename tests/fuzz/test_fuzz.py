"""What was found by fuzzing stays mended, and fuzzing finds what is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import strategies as st

from tests.fuzz.corpus import FOLDER, kept
from tests.fuzz.hunt import FindingError, Hunt, Target, tried
from tests.fuzz.targets import TARGETS, available

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS = 60.0  # more than any of these takes


def hunted(check: Callable[[bytes], object], count: int = 20_000, **more: object) -> Hunt:
    """The fuzzing of a function."""
    hunt = Hunt(Target("planted", check, st.binary(max_size=8), (b"bad",)), [b"good", b"other"], 7, **more)
    hunt.run(SECONDS, count)
    return hunt


@pytest.mark.filterwarnings("ignore")  # of numpy's, which says what it thinks of CSV
@pytest.mark.parametrize("name", TARGETS)
def test_what_was_kept_is_no_finding(name):
    """Each input has an outcome, and takes no more memory than it may."""
    if not available(TARGETS[name]):
        pytest.skip(f"{TARGETS[name].needs} is not installed")
    for data in kept(name):
        tried(TARGETS[name], data)


def test_what_is_kept_is_small():
    """At most 1 MiB, and each target has something to begin with."""
    assert sum(file.stat().st_size for file in FOLDER.rglob("*.*")) <= 1 << 20
    assert all(kept(name) for name in TARGETS)


def test_a_finding_is_found_and_made_small():
    """Its input is what it takes and nothing else."""

    def check(data):
        if b"bad" in data and data.count(b"o") > 1:
            raise KeyError(data)

    (finding,) = hunted(check).findings.values()
    assert sorted(finding.data) == sorted(b"badoo")
    assert "KeyError" in finding.text


def test_findings_are_told_apart_by_their_place():
    """Each is reported once."""

    def check(data):
        if b"b" in data:
            raise KeyError(data)
        if b"g" in data:
            raise ValueError(data)

    hunt = hunted(check, 2000)
    assert {finding.data for finding in hunt.findings.values()} == {b"b", b"g"}
    assert hunt.count == 2000


def test_new_outcomes_lead_on():
    """Inputs with an outcome that was not seen before are where others begin: five letters are found one by one."""
    word = b"attac"

    def check(data):
        met = next((size for size in range(len(word), 0, -1) if data.startswith(word[:size])), 0)
        if met == len(word):
            raise FindingError("found")
        return met

    def run(most):
        hunt = Hunt(Target("planted", check, st.binary(max_size=8), (b"a", b"t", b"c")), [b"good"], 7)
        while not hunt.findings and hunt.count < most:
            hunt.run(SECONDS, 10_000)
        return [finding.data for finding in hunt.findings.values()]

    assert run(400_000) == [word]


def test_the_same_seed_gives_the_same_inputs():
    """So that a run can be had again."""
    inputs = [[], []]
    for each in inputs:
        hunted(lambda data, each=each: each.append(data), 500)
    assert inputs[0] == inputs[1]


def test_what_takes_too_long_is_a_finding():
    """It is interrupted."""

    def check(data):
        while data == b"good":
            pass

    (finding,) = hunted(check, 200, patience=0.02).findings.values()
    assert finding.data == b"good"


def test_memory_out_of_proportion_is_a_finding():
    """Where it is measured, which a kept input always is."""
    greedy = Target("planted", lambda data: bytearray(len(data) << 20), st.binary(), memory=(1 << 20, 100))
    tried(greedy, b"")
    with pytest.raises(FindingError, match="2 bytes took"):
        tried(greedy, b"ab")


def test_the_input_at_hand_is_in_a_file(tmp_path):
    """For when the process dies of it; the file goes when all is well."""
    file, seen = tmp_path / "input", []

    def check(data):
        raw = file.read_bytes()
        seen.append(raw[4 : 4 + int.from_bytes(raw[:4], "big")] == data)

    hunted(check, 50, current=file)
    assert all(seen)
    assert not file.exists()
