"""Configurations that the model completes, and what is asked of a model that is not loaded."""

import json

import numpy as np
import pytest

from model_handlers.config.pbtxt import config_text, parse_config
from model_handlers.errors import Kind, MmeError
from model_handlers.python.handler import PythonHandler
from model_handlers.requests import ModelRequest
from model_handlers.tensor import BYTES, FP32, INT32

NOTHING = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"


def completing(*lines):
    """A model whose `auto_complete_config(c)` has these lines."""
    body = "\n".join(f"        {line}" for line in lines)
    return (
        "import triton_python_backend_utils as pb_utils\n"
        "class TritonPythonModel:\n"
        "    @staticmethod\n"
        f"    def auto_complete_config(c):\n{body}\n"
        "    def initialize(self, args):\n        self.args = args\n"
        "    def execute(self, requests):\n        return []\n"
    )


INPUT = 'c.add_input({"name": "I", "data_type": "TYPE_FP32", "dims": [4], "optional": True})'
OUTPUT = 'c.add_output({"name": "O", "data_type": "TYPE_STRING", "dims": [-1, 2]})'


def test_a_model_completes_its_configuration(models):
    """Tensors, batch size and batching come from `auto_complete_config`, are checked, and `initialize` sees them."""
    source = completing(INPUT, OUTPUT, "c.set_max_batch_size(16)", "c.set_dynamic_batching()", "return c")
    handler = models.load(source, "")
    config = handler.config
    assert [(s.name, s.data_type, s.dims, s.optional) for s in config.inputs] == [("I", FP32, (4,), True)]
    assert [(s.name, s.data_type, s.dims) for s in config.outputs] == [("O", BYTES, (-1, 2))]
    assert config.max_batch_size == 16
    assert config.dynamic_batching.preferred_batch_size == (16,)
    told = json.loads(models.author(handler).args["model_config"])
    assert (told["input"][0]["dims"], told["max_batch_size"]) == ([4], 16)


def test_what_the_configuration_says_stands(models):
    """A model may repeat what config.pbtxt says, and add to it; the rest of a declared tensor stays as declared."""
    config = """max_batch_size: 4
        dynamic_batching { max_queue_delay_microseconds: 7 }
        input { name: "I" data_type: TYPE_FP32 dims: [ 4 ] reshape { shape: [ 2, 2 ] } optional: true }
        output { name: "FIRST" data_type: TYPE_INT32 dims: [ 1 ] label_filename: "labels.txt" }"""
    source = completing(INPUT, OUTPUT, "c.set_max_batch_size(4)", "c.set_dynamic_batching()", "return c")
    handler = models.load(source, config)
    [spec] = handler.config.inputs
    assert (spec.reshape, spec.optional) == ((2, 2), True)
    assert [(s.name, s.data_type, s.label_filename) for s in handler.config.outputs] == [
        ("FIRST", INT32, "labels.txt"),
        ("O", BYTES, ""),
    ]
    assert handler.config.dynamic_batching.max_queue_delay_microseconds == 7


NAMED = 'backend: "python" input { name: "I" dims: [ 4 ] } output { name: "O" data_type: TYPE_STRING }'


def test_a_tensor_that_config_pbtxt_only_names_is_completed(models):
    """Its type, its dims or both are the model's to say; whoever only reads is told so."""
    source = completing(INPUT, OUTPUT, "return c")
    config = models.load(source, NAMED).config
    assert [(s.name, s.data_type, s.dims) for s in (*config.inputs, *config.outputs)] == [
        ("I", FP32, (4,)),
        ("O", BYTES, (-1, 2)),
    ]
    parsed, file = models.write(source, NAMED)
    with pytest.raises(MmeError, match="names its inputs and outputs in auto_complete_config"):
        PythonHandler.autocomplete(parsed, file)
    assert parse_config(config_text(parsed), model="m") == parsed


PLACES = """
    backend: "python"
    input [ { name: "I" optional: true }, { name: "J" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "K" dims: [ 4 ] } ]
    output [ { name: "P" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "O" data_type: TYPE_FP32 } ]
"""


def test_what_is_to_be_completed_is_shown_as_triton_shows_it(models):
    """In its place, with what config.pbtxt says of it; code that looks whether an input is there finds it."""
    source = completing(
        "shown = c.as_dict()['input'] + c.as_dict()['output']",
        "TritonPythonModel.shown = [(t['name'], t['data_type'], t['dims'], t.get('optional')) for t in shown]",
        "c.add_input({'name': 'K', 'data_type': 'TYPE_FP32', 'dims': [4]})",
        "c.add_input({'name': 'I', 'data_type': 'TYPE_FP32', 'dims': [2]})",
        "c.add_output({'name': 'O', 'data_type': 'TYPE_FP32', 'dims': [3]})",
        "return c",
    )
    handler = models.load(source, PLACES)
    assert models.author(handler).shown == [
        ("I", "TYPE_INVALID", [], True),
        ("J", "TYPE_INT32", [1], False),
        ("K", "TYPE_INVALID", [4], False),
        ("P", "TYPE_INT32", [1], None),
        ("O", "TYPE_FP32", [], None),
    ]
    told = [(s.name, s.data_type, s.dims, s.optional) for s in handler.config.inputs]
    assert told == [("I", FP32, (2,), True), ("J", INT32, (1,), False), ("K", FP32, (4,), False)]
    assert [s.name for s in handler.config.outputs] == ["P", "O"]
    parsed, _ = models.write(source, PLACES)
    assert parse_config(config_text(parsed), model="m") == parsed


@pytest.mark.parametrize(
    ("added", "words"),
    [
        (
            {"name": "K", "data_type": "TYPE_FP32", "dims": [5]},
            "expects dims [5] but the model configuration specifies",
        ),
        (
            {"name": "O", "data_type": "TYPE_INT32", "dims": [5]},
            "datatype TYPE_FP32 for input 'O', model provides TYPE_",
        ),
    ],
)
def test_what_is_said_of_a_tensor_that_is_to_be_completed_stands(models, added, words):
    """The model may complete it, and not contradict it."""
    config = PLACES.replace(
        'output [ { name: "P"', 'output { name: "P" data_type: TYPE_INT32 dims: [ 1 ] } input [ { name: "Q"'
    )
    assert words in models.refused(completing(f"c.add_input({added!r})", "return c"), config).message


@pytest.mark.parametrize(("added", "lacking"), [(INPUT, "output 'O'"), (OUTPUT, "input 'I'")])
def test_a_tensor_that_nobody_completes_is_an_error(models, added, lacking):
    """By its name."""
    error = models.refused(completing(added, "return c"), NAMED)
    assert f"model {lacking} must specify 'data_type' and 'dims' for m" in error.message
    assert "must specify 'data_type'" in models.refused(NOTHING, NAMED).message


def test_an_optional_input_stays_optional_when_the_model_completes_other_things(models):
    """What `auto_complete_config` does not mention does not change."""
    config = 'input { name: "I" data_type: TYPE_FP32 dims: [ 4 ] optional: true }'
    handler = models.load(completing(OUTPUT, "return c"), config)
    assert [spec.optional for spec in handler.config.inputs] == [True]


def named(name, **rest):
    """An add_ call's argument."""
    return repr({"name": name, **rest})


DECLARED = """max_batch_size: 6
    input { name: "I" data_type: TYPE_INT32 dims: [ 16 ] }
    output { name: "O" data_type: TYPE_INT32 dims: [ 16 ] }"""

CONTRADICTIONS = {
    "configuration specified max_batch_size 6, but in auto-complete-config function for model 'm' specified "
    "max_batch_size 4": "c.set_max_batch_size(4)",
    "input in auto-complete-config function for model 'm' is missing 'name' property.": "c.add_input({'dims': [1]})",
    "input 'J' in auto-complete-config function for model 'm' is missing 'data_type' property.": (
        f"c.add_input({named('J', dims=[1])})"
    ),
    "output 'J' in auto-complete-config function for model 'm' is missing 'dims' property.": (
        f"c.add_output({named('J', data_type='TYPE_FP32')})"
    ),
    "input 'J' in auto-complete-config function for model 'm' contains property other than 'name', 'data_type', 'dims' "
    "and 'optional'.": f"c.add_input({named('J', data_type='TYPE_FP32', dims=[1], shape=[1])})",
    "output 'J' in auto-complete-config function for model 'm' contains property other than 'name', 'data_type' and "
    "'dims'.": f"c.add_output({named('J', data_type='TYPE_FP32', dims=[1], optional=True)})",
    "unable to load model 'm', configuration expects datatype TYPE_INT32 for input 'I', model provides TYPE_FP32": (
        f"c.add_input({named('I', data_type='TYPE_FP32', dims=[16])})"
    ),
    "unable to load model 'm', configuration expects datatype TYPE_INT32 for output 'O', model provides TYPE_FP32": (
        f"c.add_output({named('O', data_type='TYPE_FP32', dims=[16])})"
    ),
    "model 'm', tensor 'I': the model expects dims [4] but the model configuration specifies dims [16]": (
        f"c.add_input({named('I', data_type='TYPE_INT32', dims=[4])})"
    ),
    "model 'm', tensor 'I': the model expects optional True but the model configuration specifies optional False": (
        f"c.add_input({named('I', data_type='TYPE_INT32', dims=[16], optional=True)})"
    ),
    "model transaction property in auto-complete-config function for model 'm' contains property other than "
    "'decoupled'.": "c.set_model_transaction_policy({'decoupled': True, 'other': 1})",
    "Configuration specified scheduling_choice as 'sequence_batching', but auto-complete-config function for model 'm' "
    "tries to set scheduling_choice as 'dynamic_batching'": (
        "c.as_dict()['sequence_batching'] = {}; c.set_dynamic_batching()"
    ),
    "trying to change decoupled property in auto-complete-config for model 'm', which is already set to 'False'.": (
        "c.set_model_transaction_policy({'decoupled': False}); c.set_model_transaction_policy({'decoupled': True})"
    ),
}


@pytest.mark.parametrize("sentence", CONTRADICTIONS)
def test_a_completion_that_contradicts_the_configuration_is_refused(models, sentence):
    """With Triton's words, as a ValueError that the author's code may catch."""
    error = models.refused(completing(CONTRADICTIONS[sentence], "return c"), DECLARED)
    assert error.kind is Kind.INVALID_MODEL
    assert f"ValueError: {sentence}\n" in error.message
    caught = completing("try:", f"    {CONTRADICTIONS[sentence]}", "except ValueError: pass", "return c")
    caught = caught.replace("c.set_model_transaction_policy({'decoupled': False}); ", "")
    if "'decoupled': True}" not in caught:
        models.load(caught, DECLARED)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["return None"], "must return a valid pb.ModelConfig object."),
        (["return c.as_dict()"], "must return a valid pb.ModelConfig object."),
        (["raise KeyError('k')"], "auto_complete_config ran: KeyError: 'k'\n\nAt:\n"),
        (["import sys", "sys.exit(2)"], "auto_complete_config ran: SystemExit: 2"),
        (["return c"], "at least one input or output, none were specified for 'm'"),
        ([INPUT.replace("TYPE_FP32", "FP32"), OUTPUT, "return c"], "has data_type 'FP32'"),
        ([INPUT.replace("[4]", "['x']"), OUTPUT, "return c"], "must be an integer"),
        ([INPUT.replace("[4]", "[0]"), OUTPUT, "return c"], "model input 'I' dimension must be integer >= 1"),
        ([INPUT, OUTPUT, "c.set_max_batch_size(1.5)", "return c"], "max_batch_size must be an integer"),
    ],
)
def test_a_completion_that_makes_no_sense_is_refused(models, lines, words):
    """Each names the model and what is wrong."""
    error = models.refused(completing(*lines), "")
    assert error.kind is Kind.INVALID_MODEL
    assert words in error.message


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_model_may_call_itself_decoupled(models, decoupled):
    """What auto_complete_config says of the transaction policy is in the completed configuration."""
    handler = models.load(
        completing(INPUT, OUTPUT, f"c.set_model_transaction_policy({{'decoupled': {decoupled}}})", "return c"), ""
    )
    assert bool(handler.config.decoupled) is decoupled


def test_a_model_cannot_call_itself_decoupled_where_config_pbtxt_says_that_it_is_not(models):
    """Nor the other way round."""
    for said, wanted in (("false", True), ("true", False)):
        source = completing(INPUT, OUTPUT, f"c.set_model_transaction_policy({{'decoupled': {wanted}}})", "return c")
        error = models.refused(source, f"model_transaction_policy {{ decoupled: {said} }}")
        assert (
            "trying to change decoupled property in auto-complete-config for model 'm', which is already set to "
            f"'{not wanted}'"
        ) in error.message


def test_an_empty_transaction_policy_changes_nothing(models):
    """It says nothing of what is decoupled."""
    source = completing(INPUT, OUTPUT, "c.set_model_transaction_policy({})", "return c")
    assert models.load(source, "model_transaction_policy { decoupled: true }").config.decoupled


def test_tensors_that_nobody_names_are_an_error(models):
    """Without any in config.pbtxt a model must name them itself."""
    error = models.refused(NOTHING, "")
    assert "at least one input or output, none were specified for 'm'" in error.message
    assert "add_output" in error.message


@pytest.mark.parametrize("what", ["input", "output"])
def test_a_model_may_do_without_inputs_or_without_outputs(models, what):
    """One that is asked without a tensor, or answers without one."""
    config = what + ' { name: "A" data_type: TYPE_INT32 dims: [ 1 ] }'
    answer = 'pb_utils.Tensor("A", np.array([len(r.inputs())], np.int32))' if what == "output" else ""
    source = f"""
        import numpy as np
        import triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            def execute(self, requests):
                return [pb_utils.InferenceResponse([{answer}]) for r in requests]
    """
    handler = models.load(source, config)
    parsed, file = models.write(source, config)
    assert PythonHandler.autocomplete(parsed, file).inputs == handler.config.inputs
    inputs = {} if what == "output" else {"A": np.array([1], np.int32)}
    names = tuple(spec.name for spec in handler.config.outputs)
    for each in handler.execute_requests([ModelRequest(dict(inputs), names)] * 2):
        assert [array.tolist() for array in each.outputs.values()] == ([[0]] if names else [])


# -- what is asked of a file that is not loaded ------------------------------------------------------------------------


def test_autocomplete_runs_no_code_of_the_author(models, kit):
    """It reads: a complete configuration is checked and given back."""
    config, file = models.write("raise SystemExit\n" + NOTHING)
    assert PythonHandler.autocomplete(config, file) == config


@pytest.mark.parametrize(
    ("source", "config", "kind", "words"),
    [
        ("class X:\n    def\n", None, Kind.INVALID_MODEL, "1/model.py line 2"),
        (
            "class Model:\n    pass\n",
            None,
            Kind.INVALID_MODEL,
            "no class TritonPythonModel; the classes in it are: Model",
        ),
        ("class TritonPythonModel:\n    pass\n", None, Kind.INVALID_MODEL, "does not implement `execute` method"),
        (NOTHING, "", Kind.UNSUPPORTED, "auto_complete_config"),
        (
            NOTHING + "    def auto_complete_config(c): return c",
            'output { name: "O" data_type: TYPE_FP32 dims: [ 1 ] }',
            Kind.UNSUPPORTED,
            "auto_complete_config",
        ),
    ],
)
def test_autocomplete_refuses_what_a_reader_can_see(models, kit, source, config, kind, words):
    """Syntax errors, a class that is missing, and tensors that only a load could name."""
    parsed, file = models.write(source, kit.VECTORS if config is None else config)
    with pytest.raises(MmeError) as caught:
        PythonHandler.autocomplete(parsed, file)
    assert caught.value.kind is kind
    assert words in caught.value.message


@pytest.mark.parametrize(
    "source",
    [
        "from base import TritonPythonModel",
        "from base import Model as TritonPythonModel",
        "from base import *",
        "from base import Model\nTritonPythonModel = Model",
        "if True:\n    class TritonPythonModel:\n        def execute(self, requests): return []",
        "globals()['TritonPythonModel'] = type('T', (), {'execute': print})",
        "from base import Model\nclass TritonPythonModel(Model):\n    pass",
        "class TritonPythonModel:\n    pass\nTritonPythonModel.execute = print",
        "class TritonPythonModel:\n    from base import execute",
    ],
)
def test_autocomplete_leaves_to_the_load_what_it_can_not_see(models, source):
    """A class may come from elsewhere, and so may its `execute`."""
    config, file = models.write(source)
    assert PythonHandler.autocomplete(config, file) == config
