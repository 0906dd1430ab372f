"""`mme config`: reports of directories and archives, for people and for programs, and the table of fields."""

import json
import re
import tarfile
from pathlib import Path

import pytest

from container.cli import main
from container.cli.config_check import mend_for
from tests.guessed_models import dense

ENSEMBLE = """
platform: "ensemble"
input { name: "X" data_type: TYPE_FP32 dims: [ 4 ] } output { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] }
ensemble_scheduling { step { model_name: "%s" input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" } } }
"""


@pytest.fixture
def repository(tmp_path, put):
    """A repository: `good`, `bad` with two faults, and `whole`, made of `good`."""
    put["multiple"](tmp_path / "r", "good", 2.0)
    put["multiple"](tmp_path / "r", "bad", 2.0)
    (tmp_path / "r" / "bad" / "config.pbtxt").write_text("max_batchsize: 1\nmax_batch_size: -1")
    (tmp_path / "r" / "whole" / "1").mkdir(parents=True)
    (tmp_path / "r" / "whole" / "config.pbtxt").write_text(ENSEMBLE % "good")
    return tmp_path / "r"


def packed(archive, folder, *names):
    """An archive of some directories, or of all that lies in the folder."""
    with tarfile.open(archive, "w:gz") as tar:
        for name in names or [path.name for path in folder.iterdir()]:
            tar.add(folder / name, name)
    return archive


def told(capsys, *arguments):
    """The exit code and the JSON of a check."""
    code = main.main(["config", "check", "--json", *map(str, arguments)])
    return code, json.loads(capsys.readouterr().out)


def test_a_repository_is_reported_model_by_model(repository, capsys):
    """Every problem with its file, field and what to do; exit code 1."""
    code, document = told(capsys, repository)
    assert (code, document["ok"]) == (1, False)
    [report] = document["reports"]
    assert report["kind"] == "repository"
    models = {model["name"]: model for model in report["models"]}
    assert {name: model["ok"] for name, model in models.items()} == {"bad": False, "good": True, "whole": True}
    assert [(each["file"], each["field"]) for each in models["bad"]["problems"]] == [
        ("config.pbtxt", "max_batchsize"),
        ("config.pbtxt", "max_batch_size"),
    ]
    assert models["bad"]["problems"][0]["mend"] == "did you mean max_batch_size?"
    assert models["good"]["config"]["input"][0]["name"] == "X"
    assert list(models["good"]["files"]) == ["1/model.onnx"]


def test_tensors_that_nobody_completes_are_told_once_the_file_has_told_what_runs_it(repository, capsys):
    """No backend is named; a model of Python may complete them, one of ONNX has no code that would."""
    (repository / "bad" / "config.pbtxt").write_text('input { name: "X" }')
    _, document = told(capsys, repository / "bad")
    [problem] = document["reports"][0]["models"][0]["problems"]
    assert problem["problem"] == "model input 'X' must specify 'data_type' for bad"


def test_people_read_the_same(repository, capsys):
    """What is understood, the tree, the problems and how to mend them."""
    assert main.main(["config", "check", str(repository)]) == 1
    text = capsys.readouterr().out
    assert f"{repository}: repository of 3 models, 2 problems" in text
    assert '  config.pbtxt: max_batchsize: line 1, column 1: Message type "ModelConfig" has no field' in text
    assert "      → did you mean max_batch_size?" in text
    assert "whole: ensemble of good, versions 1" in text
    assert re.search(r"    1/model.onnx +\d+ B", text)
    assert '    name: "good"' in text

    assert main.main(["config", "check", "--quiet", str(repository), str(repository / "good")]) == 1
    quiet = capsys.readouterr().out
    assert "files" not in quiet
    assert "max_batchsize" in quiet
    assert f"{repository / 'good'}: a model, no problem" in quiet


def test_a_terminal_shows_the_same_words_in_colours(repository, capsys, monkeypatch):
    """Nothing is left out or broken into lines for it."""
    assert main.main(["config", "check", str(repository)]) == 1
    plain = capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert main.main(["config", "check", str(repository)]) == 1
    coloured = capsys.readouterr().out
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


@pytest.mark.parametrize(
    ("names", "roles", "problem"),
    [
        (["good"], {"good": "model"}, ""),
        (["whole", "good"], {"whole": "entry", "good": "member"}, ""),
        (["good", "other"], {"good": "model", "other": "model"}, "holds two models or more and no ensemble"),
        (["bad", "good"], {"bad": "model", "good": "model"}, ""),
        (["whole"], {"whole": "model"}, ""),
    ],
)
def test_archives_are_opened_as_a_server_does(repository, put, tmp_path, capsys, names, roles, problem):
    """With the model that requests are for and its members, or why there is none."""
    put["multiple"](repository, "other", 3.0)
    archive = packed(tmp_path / "a.tar.gz", repository, *names)
    code, document = told(capsys, archive)
    [report] = document["reports"]
    assert {model["name"]: model["role"] for model in report["models"]} == roles
    assert code == (0 if names in (["good"], ["whole", "good"]) else 1)
    assert [problem in each["problem"] for each in report["problems"]] == [True] * bool(problem)


def test_a_model_at_the_root_of_an_archive_is_called_as_the_archive_is(repository, tmp_path, capsys):
    """An inference script too, which is not run."""
    archive = packed(tmp_path / "root.tar.gz", repository / "good")
    code, document = told(capsys, archive)
    assert (code, document["reports"][0]["models"][0]["name"]) == (0, "root")
    (tmp_path / "s" / "code").mkdir(parents=True)
    (tmp_path / "s" / "code" / "inference.py").write_text("raise SystemExit('it was run')")
    code, document = told(capsys, packed(tmp_path / "script.tar.gz", tmp_path / "s"))
    assert (code, document["reports"][0]["models"][0]["config"]["backend"]) == (0, "sagemaker")


def test_an_ensemble_by_itself_finds_its_models_beside_it(repository, capsys):
    """As a server of the repository would; one that is made of nobody is told so."""
    assert told(capsys, repository / "whole")[0] == 0
    (repository / "whole" / "config.pbtxt").write_text(ENSEMBLE % "nobody")
    code, document = told(capsys, repository / "whole")
    assert code == 1
    assert "not available or ambiguous: nobody" in document["reports"][0]["models"][0]["problems"][0]["problem"]


def test_what_can_hold_no_model(tmp_path, capsys):
    """A broken archive and an empty folder are reported; a path that is none is the caller's mistake."""
    (tmp_path / "empty").mkdir()
    code, document = told(capsys, tmp_path / "empty")
    assert (code, "no model found" in document["reports"][0]["problems"][0]["problem"]) == (1, True)
    (tmp_path / "empty" / "code").mkdir()
    (tmp_path / "empty" / "code" / "main.py").write_text("")
    _, document = told(capsys, tmp_path / "empty")
    assert "say so by SAGEMAKER_PROGRAM=main.py" in document["reports"][0]["problems"][0]["mend"]
    (tmp_path / "broken.tar.gz").write_bytes(b"no archive")
    code, document = told(capsys, tmp_path)
    mend = document["reports"][0]["problems"][0]["mend"]
    assert (code, mend) == (1, f"archives are checked by their own names: mme config check {tmp_path}/*.tar.gz")
    code, document = told(capsys, tmp_path / "broken.tar.gz")
    assert (code, len(document["reports"][0]["problems"])) == (1, 1)
    for path, words in ((tmp_path / "gone", "does not exist"), (Path(__file__), "neither a directory nor an archive")):
        assert main.main(["config", "check", str(path)]) == 2
        assert words in capsys.readouterr().err


def test_every_field_of_the_message_has_its_row(capsys):
    """Once, with a reason where it is not honoured; as text and as Markdown."""
    assert main.main(["config", "fields"]) == 0
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    paths = [path for path, *_ in rows]
    assert len(set(paths)) == len(paths)
    assert all(fate == "honoured" or reason for _, fate, *reason in rows)
    assert {"max_batch_size", "input[].dims[]", "version_policy.latest.num_versions"} <= set(paths)


@pytest.mark.parametrize("table", ["fields", "bounds"])
def test_the_documentation_has_the_table(table, capsys):
    """As `mme config fields --format markdown` and `bounds` print it; who changes a rule prints it anew."""
    assert main.main(["config", table, "--format", "markdown"]) == 0
    document = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()
    assert capsys.readouterr().out in document, f"replace its table by `mme config {table} --format markdown`"


def test_every_number_has_its_row(capsys):
    """With its limit, or why any value is harmless."""
    assert main.main(["config", "bounds"]) == 0
    shown = capsys.readouterr().out
    assert re.search(
        r"(?m)^instance_group\[\]\.count +at most 1,024 +each is a thread while it executes, or a process$", shown
    )
    assert re.search(r"(?m)^max_batch_size +at most 2,147,483,647 +any value is harmless", shown)
    assert re.search(r"(?m)^input\[\]\.dims\[\] +32 entries, each at most 1,099,511,627,776 ", shown)


def test_advice_is_by_field():
    """The nearest that is known, and none for what nobody knows."""
    assert "batch dimension" in mend_for("max_batch_size")
    assert mend_for("input[3].dims") == mend_for("output[0]")
    assert "one label a line" in mend_for("output[0].label_filename")
    assert mend_for("zzz") == ""


@pytest.mark.parametrize(
    ("first", "note"),
    [(None, "nothing says whether the first dimension is the batch"), ("T", "are none of a batch"), ("N", "")],
)
def test_a_batch_dimension_that_is_guessed_is_told(tmp_path, capsys, first, note):
    """With what to write; names of a batch leave nothing to say."""
    dense(tmp_path / "m", first)
    code, document = told(capsys, tmp_path / "m")
    notes = [each for each in document["reports"][0]["models"][0]["notes"] if each["field"] == "max_batch_size"]
    assert code == 0
    assert [note in each["problem"] for each in notes] == ([True] if note else [])
