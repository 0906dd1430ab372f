"""Libraries of custom operations are handed to every session of their model."""

import shutil
import subprocess

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from model_handlers.base import CPU
from model_handlers.config.model_config import ModelConfig
from model_handlers.errors import Kind, MmeError
from model_handlers.onnx import OnnxHandler

# A library without any operation, which notes that it was asked for them.
SOURCE = """
#include <stdio.h>
void* RegisterCustomOps(void* options, const void* api) {
    FILE* note = fopen(NOTE, "a");
    fputs("asked\\n", note);
    fclose(note);
    return 0;
}
"""


@pytest.fixture
def model_file(tmp_path):
    """The file of a model that hands X through."""
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 2]) for name in "XY"]
    graph = helper.make_graph([helper.make_node("Identity", ["X"], ["Y"])], "g", tensors[:1], tensors[1:])
    path = tmp_path / "1" / "model.onnx"
    path.parent.mkdir()
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("folder", [".", "1"])
def test_a_library_lies_beside_the_model_or_its_configuration(folder, model_file, tmp_path):
    """It is asked when the model is looked at, and when it is loaded; then the model executes."""
    source, note = tmp_path / "ops.c", tmp_path / "note"
    source.write_text(SOURCE)
    library = tmp_path / folder / "ops.so"
    subprocess.run(["cc", "-shared", "-fPIC", f'-DNOTE="{note}"', "-o", library, source], check=True)
    config = OnnxHandler.autocomplete(ModelConfig("m", op_libraries=("ops.so",)), model_file)
    handler = OnnxHandler.load(config, model_file, CPU)

    assert note.read_text() == "asked\nasked\n"
    assert handler.execute({"X": np.ones((1, 2), np.float32)}, ["Y"])[0].tolist() == [[1, 1]]
    handler.close()


@pytest.mark.parametrize(
    ("content", "words"), [(None, "is not there: put the library beside"), (b"no library", "is no library")]
)
def test_a_library_that_cannot_be_loaded_is_named(content, words, model_file, tmp_path):
    """One that is not there, and a file that is something else."""
    if content is not None:
        (tmp_path / "ops.so").write_bytes(content)
    with pytest.raises(MmeError, match=f"model 'm': model_operations.op_library_filename 'ops.so' {words}") as caught:
        OnnxHandler.load(ModelConfig("m", op_libraries=("ops.so",)), model_file, CPU)

    assert caught.value.kind is Kind.INVALID_MODEL


@pytest.mark.parametrize("name", ["/usr/lib/x86_64-linux-gnu/libm.so.6", "../ops.so", "1/../../ops.so"])
def test_a_library_outside_of_the_models_folder_is_refused(name, model_file, tmp_path):
    """A configuration reaches no file of the machine: a library is code, and its author's is all that may run."""
    (tmp_path.parent / "ops.so").write_bytes(b"never read")
    with pytest.raises(MmeError, match="is outside of the model's folder: put the library beside the model") as caught:
        OnnxHandler.load(ModelConfig("m", op_libraries=(name,)), model_file, CPU)

    assert caught.value.kind is Kind.INVALID_MODEL


def test_a_name_that_the_system_knows_is_not_searched_for(model_file):
    """A bare name means a file beside the model, never what the dynamic linker would find."""
    with pytest.raises(MmeError, match=r"'libm\.so\.6' is not there"):
        OnnxHandler.load(ModelConfig("m", op_libraries=("libm.so.6",)), model_file, CPU)
