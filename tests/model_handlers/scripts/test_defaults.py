"""What is done for functions that a script does not define, for models of each framework."""

import importlib.util
import io
import json
import sys

import joblib
import numpy as np
import pytest
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

from model_handlers.errors import Kind

IRIS = load_iris()
ROWS = IRIS.data[[0, 60, 120]]
MODEL_FN = """
import os, joblib
def model_fn(model_dir):
    return joblib.load(os.path.join(model_dir, "model.joblib"))
"""


def as_json(rows):
    """As JSON, in text."""
    return json.dumps(rows.tolist())


def as_csv(rows):
    """As CSV, in text."""
    return "".join(",".join(map(str, row)) + "\n" for row in np.atleast_2d(rows).tolist())


def as_npy(rows):
    """As numpy's format, in bytes."""
    stream = io.BytesIO()
    np.save(stream, rows)
    return stream.getvalue()


def read(body, content_type):
    """The numbers of an answer."""
    if content_type == "application/x-npy":
        return np.load(io.BytesIO(body))
    return np.array(json.loads(body)) if content_type == "application/json" else np.loadtxt(io.BytesIO(body))


FORMS = {"application/json": as_json, "text/csv": as_csv, "application/x-npy": as_npy}


@pytest.fixture(scope="module")
def classifier():
    """A model of scikit-learn."""
    return LogisticRegression(max_iter=1000).fit(IRIS.data, IRIS.target)


@pytest.fixture
def iris(scripts, classifier):
    """The same, as joblib's file beside a script of nothing but `model_fn`."""
    stream = io.BytesIO()
    joblib.dump(classifier, stream)
    return scripts.load(MODEL_FN, files={"model.joblib": stream.getvalue()})


@pytest.mark.parametrize("content_type", FORMS)
@pytest.mark.parametrize("accept", FORMS)
def test_a_model_of_scikit_learn_needs_model_fn_alone(iris, classifier, content_type, accept):
    """JSON, CSV and npy go in and come out; `predict` is asked."""
    body, said = iris.ask(FORMS[content_type](ROWS), content_type, accept)

    assert said == {"content_type": accept}
    np.testing.assert_array_equal(read(body, accept), classifier.predict(ROWS.astype(np.float32)))


@pytest.mark.parametrize("content_type", FORMS)
def test_one_row_is_a_batch_of_one(iris, content_type):
    """A single row, which numpy reads as one dimension, is answered."""
    body = FORMS[content_type](ROWS[1])

    assert json.loads(iris.body(body, content_type)) == [1]


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        ("sepal,length,petal,width\n5.1,3.5,1.4,0.2", "text/csv"),
        ("5.1,3.5,1.4,long", "text/csv"),
        ('[["5.1", "long"]]', "application/json"),
    ],
)
def test_text_that_is_no_numbers_is_the_clients_fault(iris, body, content_type):
    """A header as a rule; the sentence says what is read, and what to do about it."""
    error = iris.refused(body, content_type)

    assert error.kind is Kind.INVALID_ARGUMENT
    assert "without a header" in error.message
    assert error.message.endswith("implement input_fn for others")


def test_text_of_numbers_becomes_floats(scripts):
    """Estimators get 32-bit floats of JSON and CSV, and of npy what it holds."""
    loaded = scripts.load("""
        from sklearn.base import BaseEstimator
        class Tells(BaseEstimator):
            def predict(self, rows): return [str(rows.dtype), *rows.shape]
        def model_fn(model_dir): return Tells()
    """)

    assert loaded.told("[[1, 2]]") == ["float32", 1, 2]
    assert loaded.told("1,2\n3,4\n", "text/csv") == ["float32", 2, 2]
    assert loaded.told(as_npy(np.ones((1, 3))), "application/x-npy") == ["float64", 1, 3]


def test_a_model_that_is_no_estimator_gets_what_was_sent(scripts):
    """JSON as it was nested; CSV is rows of floats, however many there are and whatever is in them."""
    loaded = scripts.load("""
        class Tells:
            def predict(self, rows): return [str(rows.dtype), *rows.shape]
        def model_fn(model_dir): return Tells()
    """)

    assert loaded.told("[1, 2]") == ["int64", 2]
    assert loaded.told("1,2", "text/csv") == ["float64", 1, 2]
    assert loaded.told("1.0,2", "text/csv") == ["float64", 1, 2]
    assert loaded.told("1\n2\n3", "text/csv") == ["float64", 3, 1]


def test_a_model_that_can_be_called_is_called(scripts):
    """A function is a model."""
    loaded = scripts.load("def model_fn(model_dir): return lambda rows: rows * 2")

    assert loaded.told("[[1, 2]]") == [[2, 4]]


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"inputs": "hi"}, ["hi", {}]),
        ({"inputs": ["a", "b"], "parameters": {"top_k": 2}}, [["a", "b"], {"top_k": 2}]),
        ({"inputs": "hi", "parameters": None}, ["hi", {}]),
        ({"rows": [1]}, [{"rows": [1]}, {}]),
    ],
)
def test_a_pipeline_of_hugging_face_gets_inputs_and_parameters(scripts, document, expected):
    """`inputs` is what it is called with, `parameters` are its keyword arguments; it is not asked to predict."""
    loaded = scripts.load("""
        class Pipeline:
            def __call__(self, inputs, **parameters): return [inputs, parameters]
        def model_fn(model_dir): return Pipeline()
    """)

    assert loaded.told(json.dumps(document)) == expected


def test_a_pipeline_may_have_predict_as_well(scripts):
    """Those of Hugging Face do, for others' sake."""
    loaded = scripts.load("""
        class Pipeline:
            def __call__(self, inputs): return "called"
            def predict(self, rows): return "asked to predict"
        def model_fn(model_dir): return Pipeline()
    """)

    assert loaded.told('{"inputs": "hi"}') == "called"
    assert loaded.told("[1]") == "asked to predict"


LOOKS = """
def model_fn(model_dir):
    return "weights", "processor"
def predict_fn(data, model):
    given = data["inputs"]
    return {"of": len(model), "bytes": len(given)} if isinstance(given, bytes) else {"size": given.size, "mode": given.mode}
"""


@pytest.mark.parametrize("content_type", ["image/jpeg", "image/x-image; charset=none"])
def test_an_image_is_the_inputs_of_a_script_that_predicts_itself(scripts, content_type):
    """As Hugging Face's container hands it to `predict_fn`: three colours, whatever the file has."""
    stream = io.BytesIO()
    pytest.importorskip("PIL.Image").new("L", (3, 2)).save(stream, "JPEG")

    assert scripts.load(LOOKS).told(stream.getvalue(), content_type) == {"size": [3, 2], "mode": "RGB"}


@pytest.mark.parametrize("content_type", ["audio/x-audio", "audio/wav"])
def test_a_sound_is_the_inputs_of_a_script_that_predicts_itself(scripts, content_type):
    """Likewise, as the bytes that came."""
    assert scripts.load(LOOKS).told(b"RIFF....", content_type) == {"of": 2, "bytes": 8}


def test_a_body_that_is_no_image_is_the_clients_fault(scripts):
    """The script is not asked."""
    error = scripts.load(LOOKS).refused(b"no image", "image/png")

    assert error.kind is Kind.INVALID_ARGUMENT
    assert "the body is no image" in error.message


def test_an_image_without_pillow_says_so(scripts, monkeypatch):
    """Like any other type that is not read."""
    monkeypatch.setitem(sys.modules, "PIL.Image", None)

    error = scripts.load(LOOKS).refused(b"an image", "image/png")

    assert error.kind is Kind.UNSUPPORTED_MEDIA_TYPE
    assert "Pillow is not installed" in error.message


@pytest.mark.parametrize("content_type", ["image/png", "audio/wav"])
def test_images_and_sounds_are_nothing_to_the_default_predict_fn(iris, content_type):
    """It has numbers to predict from."""
    assert iris.refused(b"RIFF", content_type).kind is Kind.UNSUPPORTED_MEDIA_TYPE


@pytest.mark.parametrize("content_type", ["text/xml", "application/octet-stream", "application/x-www-form-urlencoded"])
def test_a_body_of_another_type_is_refused(iris, content_type):
    """The error says what is read, and what to write for others."""
    error = iris.refused(b"<xml>", content_type)

    assert error.kind is Kind.UNSUPPORTED_MEDIA_TYPE
    assert f"Content type {content_type} is not supported" in error.message
    assert "application/json, text/csv, application/jsonlines, application/x-npy and application/x-npz" in error.message
    assert "implement input_fn" in error.message


@pytest.mark.parametrize("accept", ["image/png", "text/html, image/*;q=0.5", "application/json;q=0"])
def test_an_answer_of_another_type_is_refused(iris, accept):
    """The error says what is written, and what to write for others."""
    error = iris.refused(as_json(ROWS), accept=accept)

    assert error.kind is Kind.NOT_ACCEPTABLE
    assert accept in error.message
    assert (
        "application/json, text/csv, application/jsonlines and application/x-npy; implement output_fn" in error.message
    )


def test_the_best_liked_type_is_written(iris):
    """A list with q-values is honoured, and the content type is the one that was chosen."""
    _, said = iris.ask(as_json(ROWS), accept="image/png, application/json;q=0.2, text/csv;q=0.3")

    assert said == {"content_type": "text/csv"}


@pytest.mark.parametrize(
    ("body", "content_type"), [("{", "application/json"), ("a,b\n1", "text/csv"), (b"no", "application/x-npy")]
)
def test_a_body_that_cannot_be_read_is_the_clients_fault(iris, body, content_type):
    """The error names the type that it is not."""
    error = iris.refused(body, content_type)

    assert error.kind is Kind.INVALID_ARGUMENT
    assert f"the body is not {content_type}" in error.message


@pytest.mark.parametrize(("body", "found"), [("1,2,3", 3), ("1,2,3,4,5", 5), ("1\n2\n3\n4", 1)])
def test_rows_of_more_or_fewer_numbers_than_features_are_the_clients_fault(iris, body, found):
    """One too few as well, and a column is no row; the sentence says both numbers."""
    error = iris.refused(body, "text/csv")

    assert error.kind is Kind.INVALID_ARGUMENT
    assert f"a row of the body has {found} numbers, and the model 4 features" in error.message


@pytest.mark.parametrize(
    ("body", "content_type", "where"),
    [
        ("5.1,3.5,1.4,0.2\n5.1,x,1.4,0.2", "text/csv", "row 2, column 2: 'x' is no number"),
        ('[[5.1, 3.5, 1.4, "x"]]', "application/json", "row 1, column 4: 'x' is no number"),
        ('[5.1, "x", 1.4, 0.2]', "application/json", "row 1, column 2: 'x' is no number"),
        ("5.1,3.5,1e39,0.2", "text/csv", "row 1, column 3: 1e+39 is infinite, or too large"),
    ],
)
def test_what_is_no_number_is_told_with_its_row_and_column(iris, body, content_type, where):
    """Counted from 1."""
    error = iris.refused(body, content_type)

    assert error.kind is Kind.INVALID_ARGUMENT
    assert where in error.message


def test_a_gap_is_the_clients_fault_where_the_model_takes_none(iris):
    """Told with its place; other errors of the model are its own."""
    error = iris.refused("5.1,3.5,1.4,0.2\n5.1,,1.4,0.2", "text/csv")

    assert error.kind is Kind.INVALID_ARGUMENT
    assert "row 2, column 2 of the body is empty, and the model takes no gaps" in error.message
    assert iris.refused("[[[1, 2, 3, 4]]]").kind is Kind.EXECUTION_FAILED


GAPS = """
import numpy as np
from sklearn.ensemble import HistGradientBoostingRegressor
def model_fn(model_dir):
    rows = np.array([[5, 3, 1], [6, np.nan, 2], [6, 0, 2], [6, -1, 2]] * 30)
    return HistGradientBoostingRegressor(min_samples_leaf=5).fit(rows, [5.1, 999.98, 0.5, 0.25] * 30)
"""


def test_a_gap_means_the_same_alone_and_beside_other_rows(scripts):
    """In CSV, as null in JSON and on lines of it: the value that the model learned for a gap."""
    loaded = scripts.load(GAPS)
    (expected,) = loaded.told("[[6, null, 2]]")

    assert expected == pytest.approx(999.98, abs=5)
    assert loaded.told("6,,2", "text/csv") == [expected]
    assert loaded.told("5,3,1\n6,,2", "text/csv")[1] == expected
    assert loaded.told("6,,2\n0.5,1e3,2", "text/csv")[0] == expected
    assert loaded.told("[6, null, 2]\n[5, 3, 1]", "application/jsonlines")[0] == expected


ONE = """
from sklearn.linear_model import LinearRegression
def model_fn(model_dir):
    return LinearRegression().fit([[0], [1]], [0, 2])
"""


@pytest.mark.parametrize(
    ("body", "content_type", "expected"),
    [
        ("1\n2\n3\n", "text/csv", [2, 4, 6]),
        ("3", "text/csv", [6]),
        ("[[1], [2], [3]]", "application/json", [2, 4, 6]),
        ("[3]", "application/json", [6]),
        ("3", "application/json", [6]),
        ("1\n2\n3\n", "application/jsonlines", [2, 4, 6]),
    ],
)
def test_a_model_of_one_feature_gets_a_column(scripts, body, content_type, expected):
    """One column stays a column."""
    np.testing.assert_allclose(scripts.load(ONE).told(body, content_type), expected, atol=1e-5)


def test_a_list_of_numbers_is_one_row_to_a_model_of_one_feature(scripts):
    """A flat list of JSON is one row to every model: three numbers are refused, not taken for three rows."""
    assert "has 3 numbers, and the model 1 features" in scripts.load(ONE).refused("[1, 2, 3]").message


@pytest.mark.parametrize(
    ("accept", "expected"),
    [("application/json", b"[[1.0, null]]"), ("application/jsonlines", b"[1.0, null]\n"), ("text/csv", b"1.0,nan\n")],
)
def test_answers_hold_no_bare_nan(scripts, accept, expected):
    """As an array that is written for the script, and as what it returned itself."""
    loaded = scripts.load("""
        import numpy as np
        def model_fn(model_dir): return 1
        def predict_fn(data, model): return np.array([[1.0, np.nan]])
    """)
    assert loaded.body("[1]", accept=accept) == expected
    returned = scripts.load(
        """
        import numpy as np
        def model_fn(model_dir): return 1
        def transform_fn(model, body, content_type, accept): return [[1.0, float("inf")]]
        """,
        name="returned",
    )
    assert returned.body("[1]") == b"[[1.0, null]]"


def test_a_torchscript_file_without_torch_says_so(scripts):
    """The sentence asks for model_fn, and names what is not installed."""
    if importlib.util.find_spec("torch"):
        pytest.skip("torch is installed")

    error = scripts.refused("", files={"model.pt": b"PK"})

    assert error.kind is Kind.INVALID_MODEL
    assert "Please provide a model_fn implementation" in error.message
    assert "model.pt would be loaded by torch, which is not installed" in error.message
