"""TensorFlow's SavedModels as SageMaker's TensorFlow container serves them, with a script's handlers and without."""

import base64
import json

import pytest

from model_handlers.errors import Kind, MmeError
from model_handlers.scripts.default_script import DEFAULT, FOLDER, SAVED_MODEL
from tests.frameworks import framework

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
JSON = "application/json"
CSV = "text/csv"
LINES = "application/jsonlines"
ATTRIBUTES = "custom_attributes"
LITERAL = {"MME_JSON_NONFINITE": "literal"}
BUILT_IN = (FOLDER / SAVED_MODEL).read_text()
HANDLERS = """
import json
import shapes

def input_handler(data, context):
    if context.request_content_type == "text/csv":
        return json.dumps({"instances": [[float(word) for word in data.read().decode("utf-8").split(",")]]})
    if context.request_content_type == "text/tell":
        return {"instances": shapes.ROW, "signature_name": context.custom_attributes}
    return data.read().decode("utf-8")

def output_handler(response, context):
    if response.status_code != 200:
        raise ValueError(response.content.decode("utf-8"))
    assert response.ok and response.json()["predictions"] and response.text
    return response.content, context.accept_header
"""

HANDLER = """
import json
import requests

def handler(data, context):
    row = [float(word) for word in data.read().decode("utf-8").split(",")]
    response = requests.post(context.rest_uri, data=json.dumps({"instances": [row]}))
    if response.status_code != 200:
        raise ValueError(f"{response.status_code} {response.text}")
    return response.content, context.accept_header
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """SavedModels by the versions' paths in archives, as files."""
    tf = framework("tensorflow")
    folder = tmp_path_factory.mktemp("saved")

    def save(place, factor):
        module = tf.Module()
        module.factor = tf.Variable(factor)

        @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32, name="x")])
        def times(x):
            return {"y": x * module.factor}

        @tf.function(
            input_signature=[
                tf.TensorSpec([None], tf.int32, name="number"),
                tf.TensorSpec([None], tf.string, name="text"),
            ]
        )
        def several(number, text):
            return {"more": number + 1, "text": tf.strings.upper(text), "raw_bytes": text}

        @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32, name="x")])
        def total(x):
            return {"total": tf.reduce_sum(x)}

        module.times, module.several, module.total = times, several, total
        tf.saved_model.save(module, str(folder / place), {"serving_default": times, "several": several, "total": total})

    for place, factor in {"a/1": 2.0, "a/10": 10.0, "b/00000003": 3.0}.items():
        save(place, factor)
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def of_a(saved):
    """An archive of the versions of one model."""
    return {path.removeprefix("a/"): content for path, content in saved.items() if path.startswith("a/")}


@pytest.fixture
def model(scripts, of_a):
    """That, without a script of its own."""
    return scripts.load(BUILT_IN, script=SAVED_MODEL, files=of_a)


@pytest.mark.parametrize(
    ("body", "content_type", "expected"),
    [
        ('{"instances": [[1, 2], [0.1, 4]]}', JSON, {"predictions": [[10, 20], [1, 40]]}),
        ('{"instances": [{"x": [1, 2]}], "signature_name": "serving_default"}', JSON, {"predictions": [[10, 20]]}),
        ('{"inputs": [[1, 2]]}', JSON, {"outputs": [[10, 20]]}),
        ('{"inputs": {"x": [[1, 2]]}}', JSON, {"outputs": [[10, 20]]}),
        ("[[1, 2], [3, 4]]", JSON, {"predictions": [[10, 20], [30, 40]]}),
        ("[1, 2]", JSON, {"predictions": [[10, 20]]}),
        ('{"x": [1, 2]}', "application/json; charset=utf-8", {"predictions": [[10, 20]]}),
        ("1,2\n3,4\n", CSV, {"predictions": [[10, 20], [30, 40]]}),
        ("[1, 2]\n[3, 4]\n", LINES, {"predictions": [[10, 20], [30, 40]]}),
        ('{"x": [1, 2]}\n{"x": [3, 4]}', LINES, {"predictions": [[10, 20], [30, 40]]}),
        ("[[1, 2]]\n", JSON, {"predictions": [[10, 20]]}),
        ('"1", 2\n3,4\n', CSV, {"predictions": [[10, 20], [30, 40]]}),
        ("1,\n3,4\n", CSV, {"predictions": [[10, None], [30, 40]]}),
        ('{"instances": [[1, null]]}', JSON, {"predictions": [[10, None]]}),
    ],
)
def test_bodies_are_what_the_container_makes_of_them(model, body, content_type, expected):
    """TensorFlow Serving's rows and columns, and what becomes rows: other JSON, lines of it, CSV."""
    assert model.told(body, content_type) == expected


def test_several_inputs_and_outputs_have_names(model):
    """Strings are text, or base64 where the output's name says bytes or it is no text."""
    binary = {"b64": base64.b64encode(b"\xff").decode()}
    rows = [{"number": 1, "text": "one"}, {"number": 2, "text": binary}]
    expected = [
        {"more": 2, "text": "ONE", "raw_bytes": {"b64": base64.b64encode(b"one").decode()}},
        {"more": 3, "text": binary, "raw_bytes": binary},
    ]
    told = model.told(json.dumps({"signature_name": "several", "instances": rows}))
    assert told == {"predictions": expected}
    columns = {"number": [1, 2], "text": ["one", binary]}
    told = model.told(json.dumps({"signature_name": "several", "inputs": columns}))
    assert told == {"outputs": {name: [row[name] for row in expected] for name in expected[0]}}


def test_numbers_are_the_shortest_that_mean_them_and_what_is_none_is_null(scripts, model, of_a):
    """Digits as TensorFlow Serving writes them; its NaN and Infinity only where that is asked for."""
    body = model.body('{"instances": [[0.05, 0]]}', custom_attributes="tfs-model-version=1")
    assert body == b'{"predictions":[[0.1,0.0]]}'
    odd = '{"instances": [[NaN, Infinity]]}'
    assert model.body(odd) == b'{"predictions":[[null,null]]}'
    assert model.body('{"instances": [[null, 1]]}') == b'{"predictions":[[null,10.0]]}'
    literal = scripts.load(BUILT_IN, script=SAVED_MODEL, files=of_a, name="literal", parameters=LITERAL)
    assert literal.body(odd) == b'{"predictions": [[NaN, Infinity]]}'


@pytest.mark.parametrize(
    ("body", "attributes", "sentence"),
    [
        ('{"instances": [[1, 2, 3]]}', "", r"input 'x' has shape \[1, 3\], but \[-1, 2\] is expected"),
        ('{"instances": [["a", "b"]]}', "", "input 'x' is of FP32, and not all that came is such a number"),
        ('{"instances": [[1], [2, 3]]}', "", "inhomogeneous"),
        ('{"instances": []}', "", "has to be a list of rows, and not an empty one"),
        ('{"instances": [{"z": 1}]}', "", "has to be an object of x"),
        ('{"inputs": {"z": 1}}', "", "'inputs' has to be an object of x"),
        ('{"instances": [1.5], "signature_name": "several"}', "", "several inputs: name each, number, text"),
        ('{"instances": [{"number": 1.5, "text": ""}], "signature_name": "several"}', "", "'number' is of INT32"),
        ('{"instances": [{"number": 4e9, "text": ""}], "signature_name": "several"}', "", "'number' is of INT32"),
        ('{"instances": [{"number": 4000000000, "text": ""}], "signature_name": "several"}', "", "can't hold all"),
        ('{"instances": [{"number": 1, "text": 1}], "signature_name": "several"}', "", "a string, or"),
        ('{"instances": [[1, 2]], "signature_name": "total"}', "", "'total' is not of 1 rows"),
        ('{"instances": [[1, 2]], "signature_name": "none"}', "", "found serving_default, several, total"),
        ('{"instances": [[1, 2]]}', "tfs-method=classify", "tfs-method is to be 'predict'"),
        ('{"instances": [[1, 2]]}', "tfs-model-version=7", "tfs-model-version is '7', but its versions are 1, 10"),
        ('{"instances": [[null, 1.5]], "signature_name": "several"}', "", "several inputs: name each, number, text"),
        ('{"instances": [{"number": null, "text": ""}], "signature_name": "several"}', "", "'number' is of INT32"),
        ('{"instances"', "", "the body is not application/json"),
        ("[1, 2]\n[3, 4]", "", "the body is not application/json"),
    ],
)
def test_what_the_client_got_wrong_is_told(model, body, attributes, sentence):
    """A 400, with what would have been right."""
    error = model.refused(body, **{ATTRIBUTES: attributes})
    assert error.kind is Kind.INVALID_ARGUMENT
    with pytest.raises(MmeError, match=sentence):
        raise error


def test_text_among_numbers_of_csv_is_told_with_its_place(model):
    """A word, where the model wants numbers; and rows of other lengths."""
    assert "row 2, column 1: 'x' is no number" in model.refused("1,2\nx,4", CSV).message
    assert "row 1 has 2 cells, row 2 has 1" in model.refused("1,2\n3", CSV).message


def test_no_other_content_type_is_read(model):
    """It is a 415, which says what is."""
    refused = model.refused(b"", "image/png")
    assert refused.kind is Kind.UNSUPPORTED_MEDIA_TYPE
    assert "reads application/json, text/csv, application/jsonlines and application/jsons;" in refused.message


@pytest.mark.parametrize(("accept", "content_type"), [("", JSON), (LINES, LINES), ("text/csv", JSON)])
def test_an_answer_is_json_whatever_is_accepted(model, accept, content_type):
    """On one line, and so a line of JSON too."""
    body, parameters = model.ask('{"instances": [[1, 2]]}', accept=accept)
    assert (json.loads(body), b"\n" in body) == ({"predictions": [[10, 20]]}, False)
    assert parameters["content_type"] == content_type


def test_clients_name_versions_and_models(scripts, saved, model):
    """By custom attributes; else it is the newest of the first. Of one model any name is taken."""
    both = scripts.load(BUILT_IN, script=SAVED_MODEL, files=saved, name="both")
    row = '{"instances": [[1, 1]]}'

    def factor(loaded, said):
        return loaded.told(row, **{ATTRIBUTES: said})["predictions"][0][0]

    assert factor(model, "tfs-model-name=whatever,tfs-model-version=1") == 2
    assert factor(both, "") == 10
    assert factor(both, "x=1,tfs-model-name=b") == 3
    assert factor(both, "tfs-model-name=a,tfs-model-version=1") == 2
    assert "its models are a, b" in both.refused(row, **{ATTRIBUTES: "tfs-model-name=c"}).message


def test_who_names_no_model_means_the_default(scripts, saved, of_a):
    """The one that SAGEMAKER_TFS_DEFAULT_MODEL_NAME names of several; of one model any name is taken."""
    parameters = {DEFAULT: "b"}
    both = scripts.load(HANDLER, files=saved, name="both", parameters=parameters)
    assert both.told("1,2", CSV) == {"predictions": [[3, 6]]}
    only = scripts.load(BUILT_IN, script=SAVED_MODEL, files=of_a, name="only", parameters=parameters)
    assert only.told("1,2", CSV) == {"predictions": [[10, 20]]}

    refused = scripts.refused(HANDLER, files=saved, name="none", parameters={DEFAULT: "c"})
    assert refused.kind is Kind.INVALID_MODEL
    assert "SAGEMAKER_TFS_DEFAULT_MODEL_NAME is 'c', but its models are a, b" in refused.message


@pytest.mark.parametrize("source", ["", "import json\ndef input_fn(body, content_type): return json.loads(body)"])
def test_clients_name_versions_beside_a_script_that_asks_for_nothing_itself(scripts, of_a, source):
    """What its functions leave to the default is asked of the version that the client means."""
    model = scripts.load(source, files=of_a)
    told = model.told('{"instances": [[1, 2]]}', custom_attributes="tfs-model-version=1")
    assert told == {"predictions": [[2, 4]]}


def test_handlers_of_a_script_stand_before_and_behind(scripts, of_a):
    """They get the body as a stream and TensorFlow Serving's answer as a response; modules of code/lib are found."""
    model = scripts.load(HANDLERS, files={**of_a, "code/lib/shapes.py": "ROW = [[1, 1]]"})

    assert model.told("1,2", CSV) == {"predictions": [[10, 20]]}
    assert model.told('{"instances": [[1, 2]]}') == {"predictions": [[10, 20]]}
    assert model.told(b"", "text/tell", custom_attributes="serving_default") == {"predictions": [[10, 10]]}
    failed = model.refused('{"instances": [[1]]}')
    assert failed.kind is Kind.EXECUTION_FAILED
    assert "has shape [1, 1]" in failed.message


def test_a_handler_asks_tensorflow_serving_itself(scripts, saved):
    """At the address that its context tells, of the model and version that the client names; for others there is 404."""
    model = scripts.load(HANDLER, files=saved)

    assert model.told("1,2", CSV) == {"predictions": [[10, 20]]}
    assert model.told("1,2", CSV, custom_attributes="tfs-model-name=a,tfs-model-version=1") == {"predictions": [[2, 4]]}
    assert '400 {"error":' in model.refused("1", CSV).message
    assert "404" in model.refused("1,2", CSV, custom_attributes="tfs-method=no/such").message


def test_one_of_two_handlers_is_refused(scripts, of_a):
    """When the model loads."""
    with pytest.raises(MmeError, match="needs both input_handler and output_handler") as caught:
        scripts.load("def input_handler(data, context): pass", files=of_a)
    assert caught.value.kind is Kind.INVALID_MODEL
