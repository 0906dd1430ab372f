"""The report of a GPU: parts that fail leave it, what is done is not done again, and what is missing is said."""

from __future__ import annotations

import json

import pytest

from benchmarks import gpu_parts, gpu_report, gpu_wheels
from benchmarks.gpu_report import PARTS, Part

SCRIPT = """
import json, pathlib, sys, time
name, notes = sys.argv[1:3]
ran = pathlib.Path({folder!r}, "ran")
ran.open("a").write(name + "\\n")
found = {{"figures": {{"speed": {{"of light": 299792458}}}}, "missing": [], "failures": {{}}}}
if name == "lacking":
    found = {{"figures": {{}}, "missing": ["a GPU"], "failures": {{}}}}
if name != "silent":
    pathlib.Path(notes).write_text(json.dumps(found))
if name in ("breaks", "silent"):
    print("something went wrong")
    sys.exit(3)
if name == "hangs":
    time.sleep(60)
"""


@pytest.fixture
def report(tmp_path, monkeypatch):
    """A function that runs parts of given names, and returns its exit code, their results, and the Markdown."""
    (tmp_path / "gpu_test_parts.py").write_text(SCRIPT.format(folder=str(tmp_path)))
    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)
    out = tmp_path / "out"

    def run(names, *words):
        parts = [Part(name, f"What {name} does", 1 if name == "hangs" else 60, "gpu_test_parts") for name in names]
        code = gpu_report.main(["--out", str(out), *words], parts)
        results = {path.name: json.loads(path.read_text()) for path in out.glob("part-*.json")}
        return code, results, (out / "report.md").read_text()

    run.ran = lambda: (tmp_path / "ran").read_text().split()
    return run


def test_parts_that_fail_leave_what_they_had_and_the_others_run(report):
    """One breaks, one ends without a word, one hangs: each has its result, and the one behind them runs."""
    code, results, text = report(["breaks", "silent", "hangs", "works"])

    assert code == 1
    states = [results[f"part-{number}.json"]["state"] for number in (1, 2, 3, 4)]
    assert states == ["failed", "failed", "timed out", "done"]
    assert results["part-1.json"]["figures"] == results["part-3.json"]["figures"] == {"speed": {"of light": 299792458}}
    assert "something went wrong" in results["part-2.json"]["log"]
    assert text.count("| speed, of light | 299792458 |") == 3
    assert "longer than it may" in text


def test_what_is_done_or_missing_is_not_run_again(report):
    """What failed is, after what never ran; a part that is named is run in any case."""
    report(["works", "lacking", "breaks", "fresh"], "--part", "1", "2", "3")
    code, _, _ = report(["works", "lacking", "breaks", "fresh"])
    assert code == 1
    assert report.ran() == ["works", "lacking", "breaks", "fresh", "breaks"]

    report(["works"], "--part", "1")
    assert report.ran()[5:] == ["works"]


def test_a_rehearsal_counts_for_nothing_on_a_gpu(report):
    """It is marked as one, and the part runs again."""
    _, results, text = report(["works"], "--rehearse")
    assert results["part-1.json"]["rehearsed"] is True
    assert "Rehearsed without a GPU" in text

    _, results, text = report(["works"])
    assert results["part-1.json"]["rehearsed"] is False
    assert "ehearsed" not in text


def test_the_report_says_what_is_missing_and_what_never_ran(report):
    """In Markdown, with a part's title."""
    _, _, text = report(["lacking", "never"], "--part", "1")

    assert "## 1. What lacking does\n\ncould not run here" in text
    assert "- missing: a GPU" in text
    assert "## 2. What never does\n\nThis part has not run." in text


def test_no_part_begins_without_time(report):
    """A call whose time is over leaves a report all the same."""
    code, results, text = report(["works"], "--minutes", "0")

    assert (code, results) == (1, {})
    assert "has not run" in text


def test_every_part_is_a_function():
    """Of the module that runs it."""
    assert all(callable(getattr(gpu_parts, part.name)) for part in PARTS)


def test_a_step_that_fails_leaves_the_rest_alone(tmp_path, capsys):
    """Each has its sentence, and what is found is in the file at once."""
    notes = gpu_parts.Notes(tmp_path / "notes", rehearse=True)

    def lacks():
        raise gpu_parts.Missing("a driver")

    def imports():
        import no_such_framework  # noqa: F401, PLC0415

    for name, do in {"first": lambda: 1, "broken": lambda: 1 // 0, "lacking": lacks, "import": imports}.items():
        notes.step(name, do)

    found = json.loads((tmp_path / "notes").read_text())
    assert found["figures"] == {"first": 1}
    assert found["failures"] == {"broken": "ZeroDivisionError: integer division or modulo by zero"}
    assert found["missing"] == ["lacking: a driver", "import: No module named 'no_such_framework'"]


def test_wheels_are_divided_and_put_together_again(tmp_path):
    """No folder is larger than asked for; without one of them the wheel that lacks is named."""
    made, most = tmp_path / "made", 3 << 20
    made.mkdir()
    contents = {"a.whl": b"a" * 10, "b.whl": bytes(range(256)) * (40 << 10), "c.whl": b"c" * (2 << 20)}
    for name, content in contents.items():
        (made / name).write_bytes(content)
    gpu_wheels.divide(sorted(made.iterdir()), tmp_path / "wheels", most)

    folders = list((tmp_path / "wheels").iterdir())
    assert len(folders) > 3
    assert all(sum(file.stat().st_size for file in folder.iterdir()) <= most for folder in folders)
    whole = tmp_path / "whole"
    whole.mkdir()
    found = gpu_wheels.joined(tmp_path / "wheels", whole)
    assert {path.name: path.read_bytes() for path in found} == contents

    next((tmp_path / "wheels").rglob("b.whl.piece-002")).unlink()
    with pytest.raises(SystemExit, match=r"lacks these wheels, or pieces of them: b\.whl$"):
        gpu_wheels.joined(tmp_path / "wheels", whole)
