"""Which backend a model belongs to."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from model_handlers import registry
from model_handlers.base import Handler
from model_handlers.errors import Kind, MmeError
from model_handlers.registry import (
    BACKENDS,
    GROUP,
    detect_backend,
    find_backend,
    handler_for,
    served_backends,
    told_by_file,
)

SERVED = [backend for backend in BACKENDS if backend.handler]


@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend.detect], ids=lambda b: b.filename)
def test_a_model_file_of_the_usual_name_tells_the_backend(backend, tmp_path):
    """A model without a configuration is recognised by its file."""
    (tmp_path / backend.filename).write_bytes(b"")

    assert detect_backend(tmp_path) is backend


def test_a_model_directory_of_the_usual_name_tells_the_backend(tmp_path):
    """A saved model is a folder, and so is an ONNX model with external data."""
    (tmp_path / "model.onnx").mkdir()

    assert detect_backend(tmp_path).name == "onnxruntime"


def test_a_file_that_several_backends_share_tells_nothing(tmp_path):
    """Tree models must name their backend."""
    (tmp_path / "xgboost.json").write_bytes(b"")

    assert detect_backend(tmp_path) is None


def test_a_directory_without_a_model_file_tells_nothing(tmp_path):
    """Neither an empty version directory nor one that does not exist has a backend."""
    assert detect_backend(tmp_path) is None
    assert detect_backend(tmp_path / "1") is None


def test_the_first_of_two_files_wins(tmp_path):
    """Two model files side by side are settled by the order of the table."""
    for name in ("model.py", "model.onnx"):
        (tmp_path / name).write_bytes(b"")

    assert detect_backend(tmp_path).name == "onnxruntime"


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.filename)
def test_a_backend_is_found_by_its_name_and_by_its_platforms(backend):
    """`backend`, each `platform`, and both together lead to the same backend."""
    assert find_backend(backend.name, "", "bert").name == backend.name
    for platform in backend.platforms:
        assert find_backend("", platform, "bert") is backend
        assert find_backend(backend.name, platform, "bert") is backend


@pytest.mark.parametrize("platform", ["python", "onnxruntime_onnx", "anything"])
@pytest.mark.parametrize("name", ["python", "openvino", "fil"])
def test_a_platform_means_nothing_to_a_backend_that_has_none(name, platform):
    """As in Triton, where people write `platform: "python"` beside the backend."""
    assert find_backend(name, platform, "bert") is find_backend(name, "", "bert")


@pytest.mark.parametrize(
    ("name", "platform", "sentence"),
    [
        ("", "caffe2_netdef", "unexpected platform type 'caffe2_netdef' for bert; there are tensorflow_savedmodel, "),
        ("", "caffe2_netdef", "pytorch_libtorch, libtorch, torch_aoti, pytorch, or name a backend instead"),
        (
            "",
            "python",
            "unexpected platform type 'python' for bert; that is a backend: write backend: \"python\" instead",
        ),
        ("", "onnx", 'write backend: "onnxruntime" instead'),
        ("torch", "", 'Write backend: "pytorch" instead.'),
        ("pytorch_libtorch", "", "'pytorch_libtorch' is a platform: write platform: \"pytorch_libtorch\" instead."),
        ("onnxruntime", "caffe2_netdef", "unexpected platform type 'caffe2_netdef' for bert"),
        (
            "pytorch",
            "onnxruntime_onnx",
            "unexpected 'platform' and 'backend' pair, got:onnxruntime_onnx, pytorch",
        ),
        ("vllm", "", "unable to find backend library for backend 'vllm'"),
    ],
)
def test_a_backend_that_nobody_knows_is_refused_by_name(name, platform, sentence):
    """The error repeats what the configuration says."""
    with pytest.raises(MmeError) as caught:
        find_backend(name, platform, "bert")

    assert caught.value.kind is Kind.INVALID_MODEL
    assert sentence in caught.value.message


def test_an_unknown_backend_is_told_which_ones_there_are():
    """The reader sees the name to write instead."""
    with pytest.raises(MmeError, match=", ".join(served_backends())):
        find_backend("onnx", "", "bert")


@pytest.mark.parametrize("backend", SERVED, ids=lambda b: b.filename)
def test_a_handler_agrees_with_its_row(backend):
    """The class that a row names serves the row's backend, from the row's file."""
    handler = handler_for(backend)

    assert issubclass(handler, Handler)
    assert handler.backend == backend.name
    assert handler.default_filename == backend.filename


EXAMPLES = ("identity", "repeat", "square")


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_found_where_nothing_is_installed(name, monkeypatch):
    """A plain checkout has no entry points: there setup.cfg registers the examples."""
    monkeypatch.setattr(metadata, "entry_points", lambda **_: ())
    backend = find_backend(name, "", "m")

    assert (backend.filename, handler_for(backend).backend) == ("", name)
    assert set(EXAMPLES) < set(served_backends())


def test_a_checkouts_own_examples_count(monkeypatch):
    """Not those of another version that is installed too, nor of packages, of which the first that is found counts."""
    points = [
        metadata.EntryPoint("square", "model_handlers.gone:Handler", GROUP),
        metadata.EntryPoint("mine", "model_handlers.examples:IdentityHandler", GROUP),
        metadata.EntryPoint("mine", "model_handlers.examples:RepeatHandler", GROUP),
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda **_: points)
    registered = registry.registrations()

    assert registered["square"] == ("model_handlers.examples:SquareHandler", "mme")
    assert registered["mine"][0] == "model_handlers.examples:IdentityHandler"


@pytest.mark.parametrize("contents", [None, b"", b"not one of ours", b"[metadata]\nname = \xff"])
def test_what_lies_beside_an_installed_package_is_no_trouble(contents, tmp_path, monkeypatch):
    """Whether there is a setup.cfg, and whatever it says."""
    if contents is not None:
        (tmp_path / "setup.cfg").write_bytes(contents)
    monkeypatch.setattr(metadata, "entry_points", lambda **_: ())
    monkeypatch.setattr(registry, "__file__", str(tmp_path / "model_handlers" / "registry.py"))

    assert registry.registrations() == {}


def test_an_installed_package_registers_the_examples(tmp_path):
    """What setuptools writes about the package has an entry point for each of them."""
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=Path(registry.__file__).parents[1], check=True, capture_output=True)
    points = [point for each in metadata.distributions(path=[str(tmp_path)]) for point in each.entry_points]

    assert {point.name for point in points if point.group == GROUP} == set(EXAMPLES)
    assert all(point.load().backend == point.name for point in points if point.group == GROUP)


def test_a_fork_server_imports_no_example():
    """Nothing imports the examples but a model of theirs: rows of the table are what fork servers import."""
    assert not any("examples" in backend.handler for backend in BACKENDS)


def test_looking_a_handler_up_imports_no_framework():
    """A server that holds no ONNX model does not pay for ONNX Runtime, a fork server not for packages' metadata."""
    program = (
        "import sys\n"
        "from model_handlers.registry import find_backend, handler_for\n"
        "handler_for(find_backend('onnxruntime', '', 'bert'))\n"
        "sys.exit(bool({'onnxruntime', 'importlib.metadata', 'configparser'} & sys.modules.keys()))"
    )

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("files", "parameters", "expected"),
    [
        ((), {}, "xgboost.json"),
        (("model.txt",), {}, "model.txt"),
        (("xgboost.json", "xgboost.model"), {}, "xgboost.model"),
        (("model.txt",), {"model_type": "xgboost_ubj"}, "xgboost.ubj"),
        (("checkpoint.tl",), {"model_type": "nonsense"}, "checkpoint.tl"),
    ],
    ids=["nothing there", "one there", "two there", "a parameter", "a parameter that means nothing"],
)
def test_the_file_of_trees_depends_on_their_kind(tmp_path, files, parameters, expected):
    """`model_type` names the file; where it is not given, or unknown, whichever file is there is it."""
    for name in files:
        (tmp_path / name).write_bytes(b"")

    assert find_backend("fil", "", "m").filename_in(tmp_path, parameters) == expected


def test_the_file_tells_between_the_formats_of_a_backend(tmp_path):
    """A configuration that names the backend alone leaves it to the file which format is meant, if that is clear."""
    pytorch = find_backend("pytorch", "", "bert")
    assert told_by_file(pytorch, tmp_path) is pytorch

    (tmp_path / "model.pt2").write_bytes(b"")
    assert told_by_file(pytorch, tmp_path).filename == "model.pt2"

    (tmp_path / "model.pt").write_bytes(b"")
    assert told_by_file(pytorch, tmp_path) is pytorch
