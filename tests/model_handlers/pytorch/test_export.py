"""Programs of torch.export and AOTInductor: names, types and shapes come from the file."""

from __future__ import annotations

import importlib
import os
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest

from model_handlers.base import CPU
from model_handlers.config.model_config import ModelConfig
from model_handlers.errors import Kind, MmeError
from model_handlers.pytorch import TorchHandler
from model_handlers.pytorch.programs import Format, recognise
from tests.frameworks import framework

torch = framework("torch")
pytestmark = pytest.mark.slow
X = np.arange(32, dtype="f4").reshape(8, 4)


class _Two(torch.nn.Module):
    """A linear layer of its first input plus its second, and the largest column."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x, shift):
        y = self.layer(x) + shift
        return y, y.argmax(1)


class _Tree(torch.nn.Module):
    """Dictionaries on both sides."""

    def forward(self, tensors, *, factor):
        return {"scaled": tensors["a"] * factor, "sum": tensors["a"] + tensors["b"]}


@pytest.fixture(scope="module")
def files(torch, tmp_path_factory):
    """Exported programs: `two` of any batch size, `tree`, and `fixed`, whose batch is 2."""
    folder = tmp_path_factory.mktemp("exported")
    batch, two = torch.export.Dim("batch"), _Two().eval()
    x, shift = torch.ones(2, 4), torch.ones(2, 3)
    sizes = {0: batch}
    programs = {
        "two": torch.export.export(two, (x, shift), dynamic_shapes=(sizes, sizes)),
        "tree": torch.export.export(
            _Tree(), ({"a": x, "b": 2 * x},), {"factor": 3 * x}, dynamic_shapes=({"a": sizes, "b": sizes}, sizes)
        ),
        "fixed": torch.export.export(two, (x, shift)),
    }
    for name, program in programs.items():
        torch.export.save(program, folder / f"{name}.pt2")
    return SimpleNamespace(module=two, **{name: folder / f"{name}.pt2" for name in programs})


def told(config):
    """What a configuration says of its tensors."""
    return {spec.name: (spec.data_type.name, spec.dims) for spec in (*config.inputs, *config.outputs)}


def test_a_program_tells_names_types_and_shapes(files):
    """Nothing needs to be declared: arguments by their names, results by their positions, and that it batches."""
    config = TorchHandler.autocomplete(ModelConfig("m"), files.two)

    assert config.max_batch_size == 4
    assert told(config) == {
        "x": ("FP32", (4,)),
        "shift": ("FP32", (3,)),
        "OUTPUT__0": ("FP32", (3,)),
        "OUTPUT__1": ("INT64", (1,)),
    }


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_predictions_are_pytorch_s_own(rows, files, load):
    """A program answers what the module does, whatever the batch."""
    handler = load(files.two)
    shift = np.ones((rows, 3), "f4")
    scores, best = handler.execute({"x": X[:rows], "shift": shift}, ["OUTPUT__0", "OUTPUT__1"])
    wanted, wanted_best = files.module(torch.from_numpy(X[:rows]), torch.from_numpy(shift))

    np.testing.assert_allclose(scores, wanted.detach().numpy(), rtol=1e-6)
    np.testing.assert_array_equal(best, wanted_best.numpy())


def test_declared_names_are_kept(files, load, specs):
    """Positions and Triton's names for arguments and results lead to the same tensors."""
    handler = load(
        files.two,
        specs(**{"ARGS[1]": ("FP32", [3]), "ARGS[0]": ("FP32", [4])}),
        specs(**{"RESULT[0]": ("FP32", [3])}),
    )
    (scores,) = handler.execute({"ARGS[0]": X, "ARGS[1]": X[:, :3]}, ["RESULT[0]"])

    assert list(told(handler.config)) == ["ARGS[1]", "ARGS[0]", "RESULT[0]"]
    wanted = files.module(torch.from_numpy(X), torch.from_numpy(X[:, :3].copy()))[0]
    np.testing.assert_allclose(scores, wanted.detach().numpy(), rtol=1e-6)


def test_dictionaries_are_known_by_their_keys(files, load):
    """What lies in a dictionary has the name of its key, going in and coming out."""
    handler = load(files.tree)
    total, scaled = handler.execute({"b": 2 * X, "factor": 3 * X, "a": X}, ["sum", "scaled"])

    assert set(told(handler.config)) == {"a", "b", "factor", "scaled", "sum"}
    np.testing.assert_array_equal(total, 3 * X)
    np.testing.assert_array_equal(scaled, 3 * X * X)


@pytest.mark.parametrize(
    ("name", "inputs", "max_batch_size", "sentence"),
    [
        (
            "two",
            {"x": ("FP64", [4])},
            8,
            "configuration expects datatype TYPE_FP64 for input 'x', model provides TYPE_FP32",
        ),
        ("two", {"x": ("FP32", [5])}, 8, r"tensor 'x': the model expects 2 dimensions \(shape \[-1,4\]\)"),
        ("two", {"y": ("FP32", [4]), "z": ("FP32", [3]), "a": ("FP32", [3])}, 8, r"has 2 inputs \(x, shift\)"),
        ("fixed", {}, 8, "model does not support batching while non-zero max_batch_size is specified"),
    ],
)
def test_a_configuration_that_disagrees_is_refused(name, inputs, max_batch_size, sentence, files, load, specs):
    """What is declared is checked against the program."""
    with pytest.raises(MmeError, match=sentence) as caught:
        load(getattr(files, name), specs(**inputs), max_batch_size=max_batch_size)

    assert caught.value.kind is Kind.INVALID_MODEL


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.skipif(os.environ.get("COMPILE_MODELS") != "1", reason="40 seconds of g++: COMPILE_MODELS=1 runs it")
def test_a_compiled_package(files, torch, specs, tmp_path):
    """An AOTInductor package answers what the program does; it keeps no types, so they must be declared."""
    path = tmp_path / "model.pt2"
    inductor = importlib.import_module("torch._inductor")
    inductor.aoti_compile_and_package(torch.export.load(files.two), package_path=str(path))
    config = ModelConfig(
        "m",
        max_batch_size=8,
        inputs=specs(**{"ARGS[0]": ("FP32", [4]), "ARGS[1]": ("FP32", [3])}),
        outputs=specs(**{"RESULT[0]": ("FP32", [3])}),
    )
    handler = TorchHandler.load(config, path, CPU)
    (scores,) = handler.execute({"ARGS[0]": X, "ARGS[1]": X[:, :3]}, ["RESULT[0]"])
    handler.close()

    assert recognise(path, "m") is Format.COMPILED
    wanted = files.module(torch.from_numpy(X), torch.from_numpy(X[:, :3].copy()))[0]
    np.testing.assert_allclose(scores, wanted.detach().numpy(), rtol=1e-5)
    with pytest.raises(MmeError, match=r"keeps names alone, neither types nor shapes \(it takes ARGS\[0\], ARGS\[1\]"):
        TorchHandler.load(ModelConfig("m"), path, CPU)


class Runs:
    """Touches a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_code_in_an_exported_program_is_never_run(files, load, tmp_path):
    """torch.export.load would fall back to unpickling anything; here it does not."""
    touched, evil = tmp_path / "touched", tmp_path / "evil.pt2"
    with zipfile.ZipFile(files.two) as source, zipfile.ZipFile(evil, "w") as target:
        for member in source.infolist():
            data = source.read(member)
            if "sample_inputs" in member.filename:
                torch.save(Runs(touched), tmp_path / "sample.pt")
                data = (tmp_path / "sample.pt").read_bytes()
            target.writestr(member.filename, data)

    assert recognise(evil, "m") is Format.EXPORTED
    with pytest.raises(MmeError, match="PyTorch can't load model 'm'"):
        load(evil, max_batch_size=0)
    assert not touched.exists()
    assert load(files.two).config.inputs[0].dims == (4,)
