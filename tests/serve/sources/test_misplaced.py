"""What is said to who packed a model in a way that is none: where its files belong."""

import pytest

from model_handlers.errors import Kind, MmeError
from serve.sources.layout import advice
from serve.sources.repository import open_target

CONFIG = 'name: "resnet" platform: "pytorch_libtorch" max_batch_size: 8'


@pytest.fixture
def tree(tmp_path):
    """A function that makes empty files by their paths, and returns the folder above them."""

    def make(*paths):
        for path in paths:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(CONFIG if path.endswith("config.pbtxt") else "")
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("paths", "clause"),
    [
        (["config.pbtxt", "model.pt"], "; move model.pt to 1/model.pt"),
        (["model.onnx"], "; move model.onnx to 1/model.onnx"),
        (["bert/model.py", "bert/readme.md"], "; move bert/model.py to bert/1/model.py"),
        (["config.pbtxt", "v1/model.onnx"], "; move v1/model.onnx to 1/model.onnx"),
        (["config.pbtxt", "version_02/model.pt"], "; move version_02/model.pt to 2/model.pt"),
        (["config.pbtxt", "001/model.onnx"], "; move 001/model.onnx to 1/model.onnx"),
        (["config.pbtxt", "weights16/model.onnx"], "; move weights16/model.onnx to 1/model.onnx"),
        (["xgboost.json"], "; move xgboost.json to 1/xgboost.json"),
        (["iris.onnx"], "; move iris.onnx to 1/model.onnx, or have `mme pack iris.onnx` do it"),
        (["config.pbtxt", "traced.pt"], "; move traced.pt to 1/model.pt, or have `mme pack traced.pt` do it"),
        (["one.onnx", "two.onnx"], ""),
        (
            ["serve-pt/resnet/config.pbtxt", "serve-pt/resnet/1/model.pt"],
            "; a model lies too deep, in 'serve-pt/resnet': pack what is in 'serve-pt', not that folder itself",
        ),
        (
            ["opt/ml/model/config.pbtxt"],
            "; a model lies too deep, in 'opt/ml/model': pack what is in 'opt/ml', not that folder itself",
        ),
        (
            ["opt/ml/model/resnet/config.pbtxt"],
            "; a model lies too deep, in 'opt/ml/model/resnet': pack what is in 'opt/ml/model', not that folder itself",
        ),
        (
            ["1/saved_model.pb", "1/variables/variables.index"],
            "; move 1/saved_model.pb and 1/variables/ into 1/model.savedmodel/",
        ),
        (
            ["00000000/saved_model.pb"],
            "; move 00000000/saved_model.pb and 00000000/variables/ into 1/model.savedmodel/",
        ),
        (
            ["export/Servo/1589/saved_model.pb"],
            "; move export/Servo/1589/saved_model.pb and export/Servo/1589/variables/ into 1589/model.savedmodel/",
        ),
        (
            ["serve/m/config.pbtxt", "serve/m/1/model.savedmodel/saved_model.pb"],
            "; a model lies too deep, in 'serve/m': pack what is in 'serve', not that folder itself",
        ),
        (["saved_model.pb"], "; move saved_model.pb and variables/ into 1/model.savedmodel/"),
        (["MAR-INF/MANIFEST.json", "service.py"], "what their handler does into code/inference.py"),
        (["bert.mar"], "not read: put what their handler does into code/inference.py"),
        (["serving.properties", "weights.bin"], "DJL Serving's: write config.pbtxt, or code/inference.py"),
        (["serving.properties", "model.py"], "DJL Serving's: write config.pbtxt, or code/inference.py"),
        (["model.pth", "code/train.py"], "; if code/train.py is its script, say so by SAGEMAKER_PROGRAM=train.py"),
        (["model.joblib"], "; model.joblib is loaded by code/inference.py with model_fn, which is not there"),
        (["model.tar.gz"], "; model.tar.gz is an archive in the archive: pack what is in it"),
        (["config.pbtxt", "encoders.pkl"], ""),
        (["weights.bin", ".git/config.pbtxt"], ""),
        ([], ""),
    ],
)
def test_where_files_belong_is_told(tree, paths, clause):
    """By the names that lie there; nothing is said of what tells nothing."""
    told = advice(tree(*paths))

    assert told.endswith(clause)
    assert bool(told) == bool(clause)


def test_a_folder_of_very_many_is_not_searched(tmp_path):
    """A store of other things is no place to look for a model."""
    for number in range(1001):
        (tmp_path / f"d{number}").mkdir()
    (tmp_path / "d5" / "m").mkdir()
    (tmp_path / "d5" / "m" / "config.pbtxt").touch()

    assert advice(tmp_path) == ""


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (
            ["resnet/config.pbtxt", "resnet/model.pt"],
            "found no version directory; move model.pt to 1/model.pt",
        ),
        (["readme.md", "serve/resnet/config.pbtxt", "serve/resnet/1/model.pt"], "lies too deep, in 'serve/resnet'"),
        (["saved_model.pb"], "into 1/model.savedmodel/"),
    ],
)
def test_a_load_says_it(tree, paths, words):
    """At the end of the sentence that says what was found."""
    with pytest.raises(MmeError) as caught:
        open_target(tree(*paths), "m.tar.gz")

    assert caught.value.kind is Kind.INVALID_MODEL
    assert words in caught.value.message
