"""SavedModels and frozen graphs: signatures, types, batches, and what is said of those that can't be served."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from model_handlers import tensorflow
from model_handlers.base import CPU, Device
from model_handlers.config.model_config import (
    BatchInput,
    BatchInputKind,
    ControlInput,
    ControlKind,
    ModelConfig,
    SequenceBatching,
    SequenceControl,
    SequenceState,
)
from model_handlers.errors import Kind, MmeError
from model_handlers.system.threads import processors
from model_handlers.tensor import FP32
from model_handlers.tensorflow import GraphdefHandler, SavedModelHandler, session_config
from tests.frameworks import framework
from tests.model_handlers.tensorflow.conftest import WEIGHTS

X = np.arange(32, dtype="f4").reshape(8, 4)


def told(config):
    """What a configuration says of its tensors."""
    return {spec.name: (spec.data_type.name, spec.dims) for spec in (*config.inputs, *config.outputs)}


def test_a_signature_tells_names_types_and_shapes(models):
    """Nothing needs to be declared, and nothing is loaded to know it."""
    config = SavedModelHandler.autocomplete(ModelConfig("m"), models.saved)

    assert config.max_batch_size == 4
    assert told(config) == {"x": ("FP32", (4,)), "best": ("INT64", (1,)), "y": ("FP32", (3,))}


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_predictions_are_tensorflow_s_own(rows, tf, models, load):
    """The signature answers what the module does, whatever the batch; an output of rows alone is one number each."""
    y, best = load(models.saved).execute({"x": X[:rows]}, ["y", "best"])
    wanted = models.module.scores(tf.constant(X[:rows]))

    np.testing.assert_allclose(y, wanted["y"].numpy(), rtol=1e-6)
    np.testing.assert_array_equal(best, wanted["best"].numpy())


def test_a_model_may_be_closed_twice(tf, models):
    """The second time nothing is left to give back."""
    handler = SavedModelHandler.load(ModelConfig("m"), models.saved, CPU)
    handler.close()
    handler.close()


def test_another_signature_by_its_name(models, load):
    """TF_SIGNATURE_DEF chooses; strings come and go as bytes."""
    shout = load(models.saved, TF_SIGNATURE_DEF="shout", TF_GRAPH_TAG="serve")
    texts = np.array([[b"ab"], ["ä".encode()], [b""]], dtype=object)
    (loud,) = shout.execute({"text": texts}, ["loud"])

    assert told(shout.config) == {"text": ("BYTES", (1,)), "loud": ("BYTES", (1,))}
    assert loud.tolist() == [[b"AB"], ["ä".encode()], [b""]]


def test_bf16_goes_by_its_bits(tf, models, load):
    """BF16 arrives and leaves in the bits of UINT16."""
    half = load(models.saved, TF_SIGNATURE_DEF="half")
    bits = np.array([[0x3F80, 0x4000]], np.uint16)  # 1, 2
    (doubled,) = half.execute({"b": bits}, ["b2"])

    assert doubled.dtype == np.uint16
    assert doubled.tolist() == [[0x4000, 0x4080]]


SIGNALS = SequenceBatching(
    control_input=(
        ControlInput("start", (SequenceControl(ControlKind.CONTROL_SEQUENCE_START, fp32_false_true=(0, 1)),)),
    ),
    state=(SequenceState("total", "next", FP32, (1,)),),
)
COUNTS = (BatchInput(BatchInputKind.ELEMENT_COUNT, ("size",), FP32, ("x",)),)


@pytest.mark.parametrize(
    ("names", "fields"),
    [(("x", "size"), {"sequence_batching": SIGNALS}), (("x", "start", "total"), {"batch_input": COUNTS})],
    ids=["sequences", "ragged batches"],
)
def test_what_the_server_adds_to_a_request_is_given_to_the_model(names, fields, models, specs):
    """Signals and states of sequences, and facts of batches, are tensors of the signature that no client sends."""
    config = ModelConfig(
        "m",
        max_batch_size=8,
        inputs=specs(**dict.fromkeys(names, ("FP32", [1]))),
        outputs=specs(sum=("FP32", [1]), **({} if "sequence_batching" in fields else {"next": ("FP32", [1])})),
        parameters={"TF_SIGNATURE_DEF": "sums"},
        **fields,
    )
    values = {"x": 3, "start": 1, "total": 10, "size": 2}
    given = {name: np.array([[value], [0]], "f4") for name, value in values.items()}
    total, following = SavedModelHandler.load(config, models.saved, CPU).execute(given, ["sum", "next"])

    assert total.tolist() == following.tolist() == [[6], [0]]


@pytest.mark.parametrize("rows", [1, 8])
def test_a_frozen_graph(rows, models, load, specs):
    """Its tensors are the ones that the configuration names."""
    frozen = load(models.frozen, specs(INPUT0=("FP32", [4])), specs(OUTPUT0=("FP32", [3])))
    (answer,) = frozen.execute({"INPUT0": X[:rows]}, ["OUTPUT0"])

    np.testing.assert_allclose(answer, X[:rows] @ WEIGHTS, rtol=1e-6)


def test_the_names_of_one_tensor(models, load, specs):
    """What is given may be asked for as well, and a tensor by two names."""
    names = ("INPUT0:0", "OUTPUT0", "OUTPUT0:0")
    outputs = specs(**{name: ("FP32", [4 if name.startswith("IN") else 3]) for name in names})
    same, *products = load(models.frozen, specs(INPUT0=("FP32", [4])), outputs).execute({"INPUT0": X}, names)

    np.testing.assert_array_equal(same, X)
    for product in products:
        np.testing.assert_allclose(product, X @ WEIGHTS, rtol=1e-6)


def test_variables_and_tables_of_a_model(models, load):
    """A variable that a call writes, and no output needs, has its value at the next; tables are filled, scalars come."""
    counts = load(models.saved, max_batch_size=0, TF_SIGNATURE_DEF="counts")
    given = {"word": np.array([b"two", b"six"], dtype=object)}
    answers = [counts.execute(given, ["before", "number", "first"]) for _ in range(2)]

    assert [[array.tolist() for array in answer] for answer in answers] == [[n, [2, -1], b"two"] for n in range(2)]
    assert [array.dtype for array in answers[0]] == ["int32", "int32", "object"]


def test_numbers_too_small_count_as_zero_as_in_tensorflow(tf, models, load):
    """They are zero where TensorFlow has its own thread compute; ours reckons on as it did before."""
    tiny = np.full((1, 4), 1e-40, "f4")
    (y,) = load(models.saved).execute({"x": tiny}, ["y"])

    assert not y.any()
    assert not models.module.scores(tf.constant(tiny))["y"].numpy().any()
    assert (tiny * np.float32(2)).all()


@pytest.mark.parametrize(
    ("parameters", "within", "between"),
    [({"TF_NUM_INTRA_THREADS": "3"}, 3, -1), ({"TF_NUM_INTER_THREADS": "1"}, None, -1), ({"TF_NUM_INTER_THREADS": "4"}, None, 4)],
)  # fmt: skip
def test_threads(parameters, within, between, tf):
    """Operators run in the thread that calls, one after the other, unless more are asked for; no GPU is looked at."""
    settled = session_config(tf, ModelConfig("m", parameters=parameters), CPU)

    assert settled.intra_op_parallelism_threads == (within or processors())
    assert settled.inter_op_parallelism_threads == between
    assert settled.device_count == {"GPU": 0}


def test_a_gpu_that_tensorflow_does_not_see(tf):
    """It is named."""
    with pytest.raises(MmeError, match=r"was to run on gpu:7, but TensorFlow does not see that GPU") as caught:
        session_config(tf, ModelConfig("m"), Device("gpu", 7))

    assert caught.value.kind is Kind.UNAVAILABLE


REFUSED = {
    "a type": ("saved", {"x": ("FP16", [4])}, {}, {}, "expects datatype TYPE_FP16 for input 'x', model provides TYPE_FP32"),
    "a shape": ("saved", {"x": ("FP32", [5])}, {}, {}, r"tensor 'x': the model expects 2 dimensions \(shape \[-1,4\]\)"),
    "an input": ("saved", {"z": ("FP32", [4])}, {}, {}, "unexpected inference input 'z', allowed inputs are: x"),
    "a signature": (
        "saved", {}, {}, {"TF_SIGNATURE_DEF": "predict"},
        "no signature 'predict': found counts, half, picks, remembers, serving_default, shout, sums; name one in TF_SIGNATURE_DEF",
    ),
    "no signature": ("bare", {}, {}, {}, "has no signature 'serving_default': found none; name one in TF_SIGNATURE_DEF, or save"),
    "a tag": ("saved", {}, {}, {"TF_GRAPH_TAG": "train"}, "no graph with the tag 'train': found serve; set TF_GRAPH_TAG"),
    "no tensors of a graph": ("frozen", {}, {}, {}, "does not say which of its tensors are inputs and outputs"),
    "an input of a graph": (
        "frozen", {"IN": ("FP32", [4])}, {"OUTPUT0": ("FP32", [3])}, {}, "unexpected inference input 'IN', allowed inputs are: INPUT0",
    ),
    "a type of a graph": (
        "frozen", {"INPUT0": ("FP64", [4])}, {"OUTPUT0": ("FP32", [3])}, {}, "model provides TYPE_FP32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_configuration_that_does_not_fit_is_refused(case, models, load, specs):
    """The sentence names what there is instead."""
    which, inputs, outputs, parameters, sentence = REFUSED[case]
    with pytest.raises(MmeError, match=sentence) as caught:
        load(getattr(models, which), specs(**inputs), specs(**outputs), **parameters)

    assert caught.value.kind is Kind.INVALID_MODEL


def test_init_ops_are_refused_by_name(models, load):
    """What is not honoured is said."""
    with pytest.raises(MmeError, match="parameter 'TF_INIT_OPS_FILE' is not honoured") as caught:
        load(models.saved, TF_INIT_OPS_FILE="init.json")

    assert caught.value.kind is Kind.UNSUPPORTED


BAD = {
    "an empty folder": (lambda path: path.mkdir(), "has no saved_model.pb and is no SavedModel"),
    "a file": (lambda path: path.write_bytes(b"x"), "has no saved_model.pb and is no SavedModel"),
    "nonsense": (
        lambda path: (path.mkdir(), (path / "saved_model.pb").write_bytes(b"\xff" * 40)),
        "'model.savedmodel/saved_model.pb' is no SavedModel",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_saved_model_is_refused(case, tf, tmp_path, load):
    """Each in one sentence."""
    write, sentence = BAD[case]
    path = tmp_path / "model.savedmodel"
    write(path)
    with pytest.raises(MmeError, match=sentence) as caught:
        load(path)

    assert caught.value.kind is Kind.INVALID_MODEL


def test_a_graph_that_is_none(tf, tmp_path, load, specs):
    """Bytes of something else are refused in TensorFlow's words."""
    path = tmp_path / "model.graphdef"
    path.write_bytes(b"\xff" * 40)
    with pytest.raises(MmeError, match="TensorFlow can't load model 'm'") as caught:
        load(path, specs(x=("FP32", [4])), specs(y=("FP32", [4])))

    assert caught.value.kind is Kind.INVALID_MODEL


def test_what_fails_inside_is_told_in_one_line(models, load):
    """An index that is none fails the batch, in TensorFlow's words."""
    picks = load(models.saved, TF_SIGNATURE_DEF="picks")
    with pytest.raises(
        MmeError, match=r"TensorFlow failed while running model 'm': .*= 9 is not in \[0, 3\)"
    ) as caught:
        picks.execute({"i": np.full((1, 4), 9, np.int32)}, ["picked"])

    assert caught.value.kind is Kind.EXECUTION_FAILED
    assert "\n" not in caught.value.message


def test_an_input_left_out(models, load):
    """A signature needs all that it names, whatever a configuration calls optional."""
    with pytest.raises(
        MmeError, match="model 'm' has to be given 'i', which its configuration calls optional"
    ) as caught:
        load(models.saved, TF_SIGNATURE_DEF="picks").execute({}, ["picked"])

    assert caught.value.kind is Kind.EXECUTION_FAILED


def test_openvino_reads_what_tensorflow_is_not_there_for(models, monkeypatch, specs):
    """Without TensorFlow its files are read by OpenVINO: the same names, the same answers."""
    framework("openvino")
    monkeypatch.setattr(tensorflow, "is_installed", lambda module: module == "openvino")
    config = ModelConfig("m", max_batch_size=8)
    saved = SavedModelHandler.load(config, models.saved, CPU)
    declared = ModelConfig(
        "m", max_batch_size=8, inputs=specs(INPUT0=("FP32", [4])), outputs=specs(OUTPUT0=("FP32", [3]))
    )
    frozen = GraphdefHandler.load(declared, models.frozen, CPU)

    assert told(SavedModelHandler.autocomplete(config, models.saved))["x"] == ("FP32", (4,))
    np.testing.assert_allclose(saved.execute({"x": X}, ["y"])[0], X @ WEIGHTS, rtol=1e-5)
    np.testing.assert_allclose(frozen.execute({"INPUT0": X}, ["OUTPUT0"])[0], X @ WEIGHTS, rtol=1e-5)
    saved.close()
    frozen.close()
    with pytest.raises(MmeError, match="parameter 'TF_SIGNATURE_DEF' needs TensorFlow, which is not installed"):
        SavedModelHandler.load(ModelConfig("m", parameters={"TF_SIGNATURE_DEF": "shout"}), models.saved, CPU)


def test_without_any_framework(monkeypatch):
    """Where neither is installed the sentence says what to install."""
    monkeypatch.setattr(tensorflow, "is_installed", lambda _: False)
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    tensorflow.tensorflow.cache_clear()
    with pytest.raises(
        MmeError, match=r"run `pip install 'mme\[tensorflow\]'`, or `pip install 'mme\[openvino\]'`"
    ) as caught:
        SavedModelHandler.traits(ModelConfig("m"), Path("model.savedmodel")).runtime.provide()
    tensorflow.tensorflow.cache_clear()

    assert caught.value.kind is Kind.UNSUPPORTED


def test_the_serving_process_does_not_import_the_framework():
    """Whether TensorFlow can use a GPU is known without it."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from model_handlers.config.model_config import ModelConfig\n"
        "from model_handlers.tensorflow import SavedModelHandler\n"
        "SavedModelHandler.traits(ModelConfig('m'), Path('model.savedmodel')).runtime.gpu_capable()\n"
        "sys.exit('tensorflow' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
