"""Files that are no PyTorch models, or must not be read."""

from __future__ import annotations

import pickle
import zipfile

import pytest

from model_handlers.errors import Kind, MmeError
from model_handlers.pytorch.programs import recognise
from tests.frameworks import framework

torch = framework("torch")


def written(path, **members):
    """A zip archive of these members, compressed, below one folder."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(f"model/{name}", data)
    return path


BAD = {
    "nothing": (lambda path: path.write_bytes(b""), "is no PyTorch file, which is a zip archive"),
    "text": (lambda path: path.write_text("def forward(x): ..."), "is no PyTorch file, which is a zip archive"),
    "a raw pickle": (
        lambda path: path.write_bytes(pickle.dumps([1])),
        r"is a pickle \(torch.save\), which could run any",
    ),
    "a module saved whole": (lambda path: torch.save(torch.nn.Linear(1, 1), path), r"is a pickle \(torch.save\)"),
    "weights alone": (lambda path: torch.save({"w": torch.ones(1)}, path), r"is a pickle \(torch.save\)"),
    "another zip": (lambda path: written(path, a=b"x"), "is a zip archive, but neither TorchScript nor an exported"),
    "a zip bomb": (
        lambda path: written(path, **{"constants.pkl": b"\0", "code/m.py": b" " * (96 << 20)}),
        r"has \d+ bytes and would unfold into 100663297: PyTorch stores weights as they are",
    ),
    "pickled constants": (
        lambda path: written(path, **{"models/model.json": b"{}", "data/constants/opaque_obj_0": b"\x80"}),
        "holds pickled Python objects as constants, which could run any code and are not read",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_is_no_model_is_refused_unread(case, tmp_path):
    """Each is told apart from its names, in one sentence that says what to save instead."""
    write, sentence = BAD[case]
    path = tmp_path / "model.pt"
    write(path)
    with pytest.raises(MmeError, match=sentence) as caught:
        recognise(path, "m")

    assert caught.value.kind is Kind.INVALID_MODEL
    assert "'model.pt' of model 'm'" in caught.value.message


def test_a_torn_file_is_refused(save, load, specs, tmp_path):
    """Half a model is none."""
    whole = save(torch.nn.Linear(4, 4)).read_bytes()
    torn = tmp_path / "torn.pt"
    torn.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(MmeError, match=r"'torn.pt' of model 'm' is no PyTorch file"):
        load(torn, specs(x=("FP32", [4])), specs(y=("FP32", [4])))


def test_a_broken_script_is_refused(load, specs, tmp_path):
    """What looks like TorchScript and is none is PyTorch's to refuse, in one line."""
    path = written(tmp_path / "model.pt", **{"constants.pkl": b"\x80\x02).", "code/m.py": b"no", "version": b"3"})
    with pytest.raises(MmeError, match="PyTorch can't load model 'm'") as caught:
        load(path, specs(x=("FP32", [4])), specs(y=("FP32", [4])))

    assert caught.value.kind is Kind.INVALID_MODEL
    assert "\n" not in caught.value.message
