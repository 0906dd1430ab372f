"""`mme pack` of bare files, fleets and ensembles: what is recognised, what is written, what is wired."""

from __future__ import annotations

import tarfile
import zipfile

import pytest

from container.ship.archive_models import ensemble_of, is_version, recognised
from model_handlers.config.model_config import ModelConfig
from model_handlers.errors import MmeError
from model_handlers.tensor import FP32, INT64, TensorSpec
from serve.sources.archive import extract
from serve.sources.repository import open_target
from tests.contract import models
from tests.guessed_models import cumulative_sum, dense


def write_zip(path, *names):
    """A zip with empty members, as PyTorch writes its files."""
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("a.onnx", b"", "model.onnx"),
        ("a.plan", b"", "model.plan"),
        ("a.engine", b"", "model.plan"),
        ("a.pt", ("a/data.pkl", "a/code/f.py", "a/constants.pkl"), "model.pt"),
        ("a.pt", ("a/models/model.json", "a/archive_format"), "model.pt2"),
        ("a.pt2", b"", "model.pt2"),
        ("a.pb", b"", "model.graphdef"),
        ("a.json", b'{"learner": {}}', "xgboost.json"),
        ("a.ubj", b"", "xgboost.ubj"),
        ("a.bst", b"", "xgboost.model"),
        ("a.txt", b"tree\nversion=v4\n", "model.txt"),
        ("a.tl", b"", "checkpoint.tl"),
        ("model.py", b"class TritonPythonModel:", "model.py"),
        ("inference.py", b"def model_fn(path):", "code/inference.py"),
    ],
)
def test_files_are_recognised(tmp_path, name, content, place):
    """By their names and first bytes; each goes where the server looks for it."""
    if isinstance(content, tuple):
        write_zip(tmp_path / name, *content)
    else:
        (tmp_path / name).write_bytes(content)

    assert recognised(tmp_path / name).place == place


def test_folders_and_pairs_are_recognised(tmp_path):
    """A SavedModel is a folder, OpenVINO's model two files; other directories are none of a framework's."""
    (tmp_path / "saved").mkdir()
    assert recognised(tmp_path / "saved") is None
    (tmp_path / "saved" / "saved_model.pb").touch()
    assert recognised(tmp_path / "saved").place == "model.savedmodel"
    (tmp_path / "ir.xml").write_text('<?xml version="1.0"?>\n<net name="a">')
    (tmp_path / "ir.bin").touch()
    assert recognised(tmp_path / "ir.xml").beside == ((tmp_path / "ir.bin", "model.bin"),)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("none.onnx", None, "does not exist"),
        ("a.docx", b"", "is no model that is known here"),
        ("a.txt", b"hello", "is no model that is known here"),
        ("forest.joblib", b"", "pack a folder of it and code/inference.py, whose model_fn loads it, or convert it"),
        ("a.tar.gz", b"\x1f\x8b", "is packed already: `mme config check` tells what it holds, `mme push` uploads it"),
        ("a.json", b"[]", "is no model that is known here"),
        ("a.pt", ("a/data.pkl",), "holds weights and no program"),
        ("a.pth", b"\x80\x02}q", "torch.jit.script"),
        ("a.xml", b"<html>", "begins with <net"),
        ("a.xml", b"<net>", "put a.bin there"),
        ("model.py", b"class Model:", "no class TritonPythonModel"),
        ("predict.py", b"def model_fn(path):", "is called inference.py"),
    ],
)
def test_what_is_no_model_is_refused_with_what_would_be(tmp_path, name, content, sentence):
    """One sentence that says what to write instead."""
    if isinstance(content, tuple):
        write_zip(tmp_path / name, *content)
    elif content is not None:
        (tmp_path / name).write_bytes(content)

    with pytest.raises(MmeError, match=sentence):
        recognised(tmp_path / name)


@pytest.fixture
def plus(tmp_path):
    """A bare ONNX file: X [N, 4] → Y = X + 1."""
    path = tmp_path / "plus.onnx"
    path.write_bytes(models.plus(1))
    return path


def unpacked(archive, tmp_path):
    """The model in an archive."""
    with archive.open("rb") as stream:
        extract(stream, tmp_path / f"{archive.name}-unpacked", name=archive.name)
    return open_target(tmp_path / f"{archive.name}-unpacked", archive.name)


def test_a_bare_file_gets_a_configuration_in_writing(mme, plus, tmp_path):
    """Inputs, outputs, batches and dynamic batching as the server would have completed them, under no name."""
    assert mme("pack", plus, "-o", tmp_path / "a.tar.gz").code == 0
    config = unpacked(tmp_path / "a.tar.gz", tmp_path).config

    assert [(spec.name, spec.dims) for spec in (*config.inputs, *config.outputs)] == [("X", (4,)), ("Y", (4,))]
    assert config.max_batch_size > 1
    assert config.dynamic_batching is not None
    with tarfile.open(tmp_path / "a.tar.gz") as archive:
        text = archive.extractfile("plus/config.pbtxt").read().decode()
    assert 'backend: "onnxruntime"' in text
    assert 'name: "plus"' not in text


def test_what_no_server_takes_is_not_packed(mme, tmp_path):
    """A type that the protocol can't carry: every load of the archive would be refused."""
    (tmp_path / "m.onnx").write_bytes(models.sequence())

    told = mme("pack", tmp_path / "m.onnx", "-o", tmp_path / "a.tar.gz")

    assert told.code == 1
    assert "tensor 'Y' has ONNX type seq(tensor(float)), which can't be sent over the protocol" in told.err
    assert not (tmp_path / "a.tar.gz").exists()


@pytest.mark.parametrize(
    ("write", "first", "written"),
    [(dense, None, (0, ())), (dense, "N", (4, (4,))), (cumulative_sum, "time", (0, (-1, 4)))],
)
def test_no_guess_is_put_in_writing(mme, tmp_path, write, first, written):
    """What is written is trusted: a model that may batch is the server's to try, and one over time has whole shapes."""
    file = write(tmp_path / "model", first)
    told = mme("pack", file, "--name", "m", "-o", tmp_path / "a.tar.gz")
    assert told.code == 0
    config = unpacked(tmp_path / "a.tar.gz", tmp_path).config
    assert (config.max_batch_size, config.inputs[0].dims if config.inputs else ()) == written
    assert ("does not say whether it batches" in told.err) is (first is None)


def test_a_configuration_of_ones_own(mme, plus, tmp_path):
    """Is packed as it is; a directory that has one already refuses another."""
    (tmp_path / "mine.pbtxt").write_text("max_batch_size: 2\n")

    assert mme("pack", plus, "--config", tmp_path / "mine.pbtxt", "-o", tmp_path / "a.tar.gz").code == 0
    opened = unpacked(tmp_path / "a.tar.gz", tmp_path)
    assert (opened.path / "config.pbtxt").read_text() == "max_batch_size: 2\n"
    said = mme("pack", opened.path, "--config", tmp_path / "mine.pbtxt", "-o", tmp_path / "b.tar.gz")
    assert (said.code, "of its own" in said.err) == (2, True)


def test_a_fleet_of_copies(mme, plus, tmp_path):
    """As many archives of the same content, under names with a number, and none without."""
    said = mme("pack", plus, "--copies", "3", "-o", tmp_path / "bert.tar.gz")

    assert said.code == 0
    names = sorted(path.name for path in tmp_path.glob("*.tar.gz"))
    assert names == ["bert-0.tar.gz", "bert-1.tar.gz", "bert-2.tar.gz"]
    assert all(name in said.out for name in names)
    assert len({(tmp_path / name).read_bytes() for name in names}) == 1
    assert mme("pack", plus, "--copies", "0", "-o", tmp_path / "bert.tar.gz").code == 2
    (tmp_path / "bert.tar.gz").write_text("somebody's")
    mme("pack", plus, "--copies", "3", "-o", tmp_path / "bert.tar.gz")
    assert (tmp_path / "bert.tar.gz").read_text() == "somebody's", "none of the copies is called so"


def test_a_folder_of_a_model_file_is_a_version(mme, plus, tmp_path):
    """It is packed as version 1; one with a script, versions or a configuration is what it says it is."""
    folder = tmp_path / "mine"
    folder.mkdir()
    plus.rename(folder / "model.onnx")

    assert is_version(folder)
    assert mme("pack", folder, "-o", tmp_path / "a.tar.gz").code == 0
    assert unpacked(tmp_path / "a.tar.gz", tmp_path).model_file(1).name == "model.onnx"
    for name in ("code/inference.py", "1/model.onnx", "config.pbtxt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
        assert not is_version(folder)
        (folder / name).unlink()
        if "/" in name:
            (folder / name).parent.rmdir()


def test_a_script_alone_is_packed_where_its_container_looks(mme, tmp_path):
    """Under code/ at the root of the archive."""
    (tmp_path / "inference.py").write_text("def model_fn(path):\n    return None\n")

    assert mme("pack", tmp_path / "inference.py", "--name", "s", "-o", tmp_path / "s.tar.gz").code == 0
    assert unpacked(tmp_path / "s.tar.gz", tmp_path).config.default_model_filename == "code/inference.py"


def test_an_ensemble_is_wired_and_packed(mme, plus, tmp_path):
    """Of a file and a directory: one archive whose model is the ensemble."""
    models.lay_out(tmp_path / "second", models.plus(2), "max_batch_size: 8\n")
    said = mme("pack", plus, tmp_path / "second", "--ensemble", "plus,second", "-o", tmp_path / "both.tar.gz")

    assert said.code == 0, said.err
    opened = unpacked(tmp_path / "both.tar.gz", tmp_path)
    assert [member.path.name for member in opened.members] == ["plus", "second"]
    assert wires(opened.config) == [({"X": "X"}, {"Y": "plus_Y"}), ({"X": "plus_Y"}, {"Y": "Y"})]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("plus.onnx", "--ensemble", "plus,none", "-o", "a.tar.gz"), "there is no model 'none' among plus"),
        (("plus.onnx", "--ensemble", "plus", "-o", "plus.tar.gz"), "can't be called 'plus'"),
        (("plus.onnx", "plus.onnx", "-o", "a.tar.gz"), "two models have one name"),
        (("plus.onnx", "other.onnx"), "several models become one archive: name it"),
        (("plus.onnx", "plus.onnx", "-o", "."), "two models would be 'plus.tar.gz'"),
        (("plus.onnx", "other.onnx", "--name", "a", "-o", "."), "--name is for one model"),
        (("plus.onnx", "other.onnx", "--ensemble", "plus,other", "-o", "."), "an ensemble is one archive"),
        (("plus.onnx", "other.onnx", "--config", "other.onnx", "-o", "a.tar.gz"), "--config is for one model"),
    ],
)
def test_several_models_that_make_no_archive(mme, plus, tmp_path, monkeypatch, arguments, sentence):
    """One sentence, exit code 2."""
    (tmp_path / "other.onnx").write_bytes(models.plus(2))
    monkeypatch.chdir(tmp_path)
    said = mme("pack", *arguments)

    assert said.code == 2
    (line,) = said.err.splitlines()
    assert sentence in line


def test_into_a_folder_goes_an_archive_of_each(mme, plus, tmp_path):
    """Called after the models; a line each, and no configuration."""
    models.lay_out(tmp_path / "second", models.plus(2), "max_batch_size: 8\n")
    (tmp_path / "archives").mkdir()
    said = mme("pack", plus, tmp_path / "second", "-o", tmp_path / "archives")

    assert said.code == 0, said.err
    assert [line.rpartition(":")[0] for line in said.out.splitlines()] == [
        str(tmp_path / "archives" / f"{name}.tar.gz") for name in ("plus", "second")
    ]
    assert unpacked(tmp_path / "archives" / "second.tar.gz", tmp_path).config.max_batch_size == 8


def test_one_model_may_go_into_a_folder_as_well(mme, plus, tmp_path):
    """Under another name, and told whole."""
    (tmp_path / "archives").mkdir()
    said = mme("pack", plus, "--name", "more", "-o", tmp_path / "archives")

    assert said.code == 0, said.err
    assert "configuration in effect" in said.out
    assert (tmp_path / "archives" / "more.tar.gz").is_file()


def step(name, inputs, outputs, batch=8):
    """A model of FP32 tensors [4], or of what a (name, type, dims) says."""

    def specs(names):
        return tuple(TensorSpec(*(each if isinstance(each, tuple) else (each, FP32, (4,)))) for each in names)

    return ModelConfig(name=name, max_batch_size=batch, inputs=specs(inputs), outputs=specs(outputs))


def wires(config):
    """Each step's inputs and outputs, as the ensemble's tensors."""
    return [(dict(each.input_map), dict(each.output_map)) for each in config.ensemble]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((("a", ["X"], ["Y"]), ("b", ["Y"], ["Z"])), [({"X": "X"}, {"Y": "a_Y"}), ({"Y": "a_Y"}, {"Z": "Z"})]),
        ((("a", ["X"], ["Y"]), ("b", ["IN"], ["OUT"])), [({"X": "X"}, {"Y": "a_Y"}), ({"IN": "a_Y"}, {"OUT": "OUT"})]),
        ((("a", ["X"], ["X"]), ("b", ["X"], ["X"])), [({"X": "X"}, {"X": "a_X"}), ({"X": "a_X"}, {"X": "b_X"})]),
        (
            (("a", ["X", "MASK"], ["Y"]), ("b", ["Y", "MASK"], ["Z"])),
            [({"X": "X", "MASK": "MASK"}, {"Y": "a_Y"}), ({"Y": "a_Y", "MASK": "MASK"}, {"Z": "Z"})],
        ),
        ((("a", ["X"], ["Y"]), ("a", ["X"], ["Y"])), [({"X": "X"}, {"Y": "a_Y"}), ({"X": "a_Y"}, {"Y": "Y"})]),
        ((("a", ["X"], ["P", "Q"]), ("b", ["P"], ["Z"])), [({"X": "X"}, {"P": "a_P"}), ({"P": "a_P"}, {"Z": "Z"})]),
        (
            (("a", ["X"], ["P", "Q"]), ("b", ["R", "S"], ["Z"])),
            [({"X": "X"}, {"P": "a_P", "Q": "a_Q"}), ({"R": "a_P", "S": "a_Q"}, {"Z": "Z"})],
        ),
    ],
)
def test_steps_are_wired(steps, expected):
    """By names, and by order where no name is known; what the first is given reaches the others too."""
    assert wires(ensemble_of("e", [step(*each) for each in steps])) == expected


def test_an_ensemble_batches_as_its_least_step():
    """One that does not batch makes an ensemble of whole shapes."""
    both = ensemble_of("e", [step("a", ["X"], ["Y"], 8), step("b", ["Y"], ["Z"], 4)])
    assert (both.max_batch_size, both.inputs[0].dims) == (4, (4,))
    whole = ensemble_of("e", [step("a", ["X"], ["Y"], 8), step("b", [("Y", FP32, (-1, 4))], ["Z"], 0)])
    assert (whole.max_batch_size, whole.inputs[0].dims) == (0, (-1, 4))


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ((("a", ["X"], ["Y"]), ("b", ["Y", "MASK"], ["Z"])), "nobody makes input 'MASK' of 'b'"),
        ((("a", ["X"], [("Y", INT64, (4,))]), ("b", ["Y"], ["Z"])), "is FP32 .4., and 'Y' before it is INT64 .4."),
        ((("a", ["X"], [("Y", FP32, (3,))]), ("b", ["Y"], ["Z"])), "put a model between them"),
        ((("a", ["X"], []), ("b", ["Y"], ["Z"])), "the inputs and outputs of 'a' are not known"),
    ],
)
def test_steps_that_do_not_fit_are_refused(steps, sentence):
    """By the names of the model and the tensor."""
    with pytest.raises(MmeError, match=sentence):
        ensemble_of("e", [step(*each) for each in steps])
