"""The names of classes: files in, names out; and those of ensembles."""

from types import MappingProxyType

import pytest

from model_handlers.config.model_config import EnsembleStep, ModelConfig
from model_handlers.errors import Kind, MmeError
from model_handlers.tensor import FP32, TensorSpec
from serve.model.warmup import ensemble_labels, read_labels


def config(*steps, **outputs):
    """A model with outputs and their files of labels."""
    specs = tuple(TensorSpec(name, FP32, (2,), label_filename=file) for name, file in outputs.items())
    return ModelConfig("m", outputs=specs, ensemble=steps)


def test_labels_are_lines(tmp_path):
    """In order, without what surrounds them; outputs without a file have none."""
    (tmp_path / "labels.txt").write_text("ant\n bee \r\ncat", "utf-8")
    assert read_labels(config(Y="labels.txt", Z=""), tmp_path) == {"Y": ("ant", "bee", "cat")}


@pytest.mark.parametrize(("content", "words"), [(None, "there is no such file"), (b"\xff", "is not UTF-8 text")])
def test_a_file_that_is_no_list_of_labels_is_refused(tmp_path, content, words):
    """By output and file."""
    if content is not None:
        (tmp_path / "labels.txt").write_bytes(content)
    with pytest.raises(MmeError, match=words) as caught:
        read_labels(config(Y="labels.txt"), tmp_path)
    assert caught.value.kind is Kind.INVALID_MODEL
    assert "label_filename 'labels.txt' of output 'Y' of model 'm'" in caught.value.message


def test_an_ensemble_has_its_own_labels_or_those_of_its_models():
    """Of the model that writes an output, by the name that the ensemble gives it."""
    step = EnsembleStep("part", -1, MappingProxyType({}), MappingProxyType({"P": "A", "Q": "B", "R": "inside"}))
    parts = {"part": {"P": ("one",), "Q": ("two",), "R": ("three",)}}
    assert ensemble_labels(config(step, A="", B="own.txt"), {"B": ("own",)}, parts) == {"A": ("one",), "B": ("own",)}
