"""Models of XGBoost, by a script that defines little, and by none."""

import io
import json
import pickle
import struct

import numpy as np
import pytest

from model_handlers.base import CPU
from model_handlers.config.model_config import ModelConfig
from model_handlers.errors import Kind
from model_handlers.scripts.default_script import FOLDER
from model_handlers.scripts.host import ScriptHandler
from tests.frameworks import framework
from tests.model_handlers.scripts.conftest import Loaded
from tests.model_handlers.scripts.records import record

xgboost = framework("xgboost")

CSV, SVM, NPY = "text/csv", "text/libsvm", "application/x-npy"
RECORDIO = "application/x-recordio-protobuf"
ROWS = np.random.default_rng(0).random((40, 3)).astype(np.float32)
ROWS[0, 1] = np.nan
BOOSTER = xgboost.train({"max_depth": 3}, xgboost.DMatrix(ROWS, ROWS[:, 0] * 2 - ROWS[:, 2]), 4)
EXPECTED = BOOSTER.predict(xgboost.DMatrix(ROWS[:2]))
PICKLED = """
import os, pickle
def model_fn(model_dir):
    with open(os.path.join(model_dir, "xgboost-model"), "rb") as file:
        return pickle.load(file)
"""


def saved(form):
    """The booster's file."""
    return pickle.dumps(BOOSTER) if form == "pickle" else bytes(BOOSTER.save_raw(form))


def as_csv(rows, missing="", separator=","):
    """Rows as text."""
    return "".join(
        separator.join(missing if np.isnan(value) else str(value) for value in row) + "\n" for row in rows.tolist()
    )


def as_svm(rows, label="1 "):
    """Rows as LIBSVM, whose columns count from nothing."""
    lines = [
        label + " ".join(f"{column}:{value}" for column, value in enumerate(row) if not np.isnan(value))
        for row in rows.tolist()
    ]
    return "\n".join(lines)


def as_npy(rows):
    """Rows in numpy's format."""
    stream = io.BytesIO()
    np.save(stream, rows)
    return stream.getvalue()


def as_records(rows, dtype="<f4", field=2):
    """Rows as RecordIO."""
    return b"".join(record(row.astype(dtype).tobytes(), field=field) for row in rows)


@pytest.fixture
def bare(scripts, request):
    """The model of an archive that is its file alone."""

    def load(form="ubj", **parameters):
        directory = scripts.root / "bare"
        directory.mkdir()
        (directory / "xgboost-model").write_bytes(saved(form))
        parameters = {"SAGEMAKER_SUBMIT_DIRECTORY": str(FOLDER), **parameters}
        config = ModelConfig("m", "sagemaker", default_model_filename="booster.py", parameters=parameters)
        handler = ScriptHandler.load(config, directory / "booster.py", CPU, "m_0_0")
        request.addfinalizer(handler.close)
        return Loaded(handler)

    return load


@pytest.mark.parametrize("form", ["ubj", "json", "pickle"])
def test_a_file_of_xgboost_is_a_model(bare, form):
    """In its own formats, and pickled; a client that says nothing is answered in JSON where nothing else is set."""
    body, said = bare(form).ask(as_csv(ROWS[:2]), CSV)

    assert said == {"content_type": "application/json"}
    np.testing.assert_allclose(json.loads(body), EXPECTED, rtol=1e-6)


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (as_csv(ROWS[:2]), CSV),
        (as_csv(ROWS[:2]).rstrip(), "text/csv; charset=utf-8"),
        (as_csv(ROWS[:2], "nan"), CSV),
        (as_csv(ROWS[:2], separator=";"), CSV),
        (as_csv(ROWS[:2], separator="\t"), CSV),
        (as_svm(ROWS[:2]), SVM),
        (as_csv(ROWS[:2], '""'), CSV),
        (as_svm(ROWS[:2], label=""), "text/x-libsvm"),
        ("# a comment\n" + as_svm(ROWS[:2]) + " # another\r\n\n", SVM),
        (
            "".join(json.dumps([None if np.isnan(each) else each for each in row]) + "\n" for row in ROWS[:2].tolist()),
            "application/jsonlines",
        ),
        (json.dumps(ROWS[:2].tolist()), "application/json"),
        (as_npy(ROWS[:2]), NPY),
        (as_records(ROWS[:2]), RECORDIO),
        (as_records(ROWS[:2], "<f8", 3), RECORDIO),
        (
            record(ROWS[0, ::2].tobytes(), (0, 2), (3,)) + record(ROWS[1].tobytes(), (0, 1, 2), (3,)),
            RECORDIO,
        ),
    ],
)
def test_rows_are_read_in_every_form(bare, body, content_type):
    """CSV and LIBSVM as the container reads them, and arrays as any other model does; gaps are missing values."""
    np.testing.assert_allclose(bare().told(body, content_type), EXPECTED, rtol=1e-6)


@pytest.mark.parametrize(
    ("body", "content_type"), [("0:0.5", SVM), (record(np.array([0.5], "<f4").tobytes(), (0,)), RECORDIO)]
)
def test_columns_that_a_body_leaves_out_are_missing(bare, body, content_type):
    """However few there are, where it does not say how many columns a row has."""
    expected = BOOSTER.predict(xgboost.DMatrix(np.array([[0.5, np.nan, np.nan]], np.float32)))

    np.testing.assert_allclose(bare().told(body, content_type), expected, rtol=1e-6)


@pytest.mark.parametrize(("parameters", "ends"), [({}, ""), ({"SAGEMAKER_BATCH": "true"}, "\n")])
def test_csv_is_written_as_the_container_does(bare, parameters, ends):
    """Between commas, or on lines of their own where a batch transform puts answers together."""
    body, said = bare(**parameters).ask(as_csv(ROWS[:2]), CSV, "text/csv, */*;q=0.1")

    assert said == {"content_type": CSV}
    values = body.decode().removesuffix(ends).split(ends or ",")
    np.testing.assert_allclose([float(value) for value in values], EXPECTED, rtol=1e-6)
    assert body.decode().endswith(ends)


@pytest.mark.parametrize(
    ("body", "content_type", "words"),
    [
        ("1,2,3,4", CSV, "a row of the body has 4 numbers, and the model 3 features"),
        ("1", CSV, "a row of the body has 1 numbers, and the model 3 features"),
        ("1,2", CSV, "a row of the body has 2 numbers, and the model 3 features"),
        ("[[1, 2]]", "application/json", "a row of the body has 2 numbers, and the model 3 features"),
        (as_npy(ROWS[:1, :2]), NPY, "a row of the body has 2 numbers, and the model 3 features"),
        (as_records(ROWS[:1, :2]), RECORDIO, "a row of the body has 2 numbers, and the model 3 features"),
        ("1,2,3\n1,2", CSV, "its rows are not all of one length"),
        ("1,2,3\n1,b,3", CSV, "row 2, column 2: 'b' is no number"),
        ("1,1_0,3", CSV, "row 1, column 2: '1_0' is no number"),
        ("", CSV, "it holds no row"),
        ("1 0:a", SVM, "line 1: '0:a' is no pair column:value"),
        ("1,2,3\n4,5,6", SVM, "line 1: '1,2,3' is no pair column:value"),
        ("1;2;3", SVM, "line 1: '1;2;3' is no pair column:value"),
        ("1 2 3", SVM, "line 1: '2' is no pair column:value"),
        ("5\n3\n1\n", SVM, "it holds labels, or CSV, and not one pair column:value"),
        ("[[1, 2, 3]]", SVM, "line 1: '[[1,' is no pair column:value"),
        ("0:1 0:2", SVM, "line 1 has column 0 twice"),
        ("1 -1:2", SVM, "line 1: '-1:2' is no pair column:value"),
        ("0:1\n\n0:2", SVM, "line 2 is empty"),
        ("# 0:1", SVM, "it holds no row"),
        ("1 7:1", SVM, "a row of the body has column 7, counted from 0, and the model 3 features"),
        ("", SVM, "it holds no row"),
        ("1,2,1e39", CSV, "row 1, column 3: 1e+39 is infinite, or too large"),
        ("1,2,inf", CSV, "a number is infinite, or too large"),
        ("0:-inf", SVM, "a number is infinite, or too large"),
        (f"{10**30}:1", SVM, "the body is not rows of numbers in"),
        (b"", RECORDIO, "it holds no record"),
        (as_records(ROWS[:1])[:-4], RECORDIO, "at byte 0 there is no whole record"),
        (as_records(ROWS[:1]) + b"rest", RECORDIO, "its last record is cut off"),
        (b"8 bytes, " + as_records(ROWS[:1]), RECORDIO, "at byte 0 there is no whole record"),
        (struct.pack("<II", 0xCED7230A, 4) + b"\xff" * 4, RECORDIO, "the body is not rows of numbers in"),
        (record(b"", name=b"other"), RECORDIO, "a record has no feature 'values'"),
        (record(b"", field=9), RECORDIO, "the feature 'values' of a record is no numbers"),
        (record(bytes(8)) + record(bytes(12)), RECORDIO, "its rows are not all of one length"),
        (record(bytes(16)), RECORDIO, "a row of the body has 4 numbers, and the model 3 features"),
        (record(bytes(8), (1,), (3,)), RECORDIO, "has not as many values as columns"),
        (record(bytes(4), (7,), (3,)), RECORDIO, "the body is not rows of numbers in"),
        (record(bytes(8), (1, 1), (3,)), RECORDIO, "a record has a column twice"),
        (record(bytes(8), shape=(3,)), RECORDIO, "a record has 2 values, and is of shape [3]"),
        (record(bytes(8)) + record(bytes(4), (0,), (3,)), RECORDIO, "its rows are not all of one length"),
        ('[[1, 2, "x"]]', "application/json", "row 1, column 3: 'x' is no number"),
        ("[[[1, 2, 3]]]", "application/json", "they have 3 dimensions"),
        ('{"rows": 1}', "application/json", "the body is not rows of numbers in application/json"),
    ],
)
def test_a_body_that_does_not_fit_is_the_clients_fault(bare, body, content_type, words):
    """The sentence says what is wrong with it."""
    error = bare().refused(body, content_type)

    assert error.kind is Kind.INVALID_ARGUMENT
    assert words in error.message


def test_several_values_for_each_row_are_cells(scripts):
    """An answer is rows of cells, and no cell that holds commas."""
    booster = xgboost.train(
        {"objective": "multi:softprob", "num_class": 3}, xgboost.DMatrix(ROWS, (ROWS[:, 0] * 3).astype(int)), 2
    )
    directory = scripts.root / "classes"
    directory.mkdir()
    (directory / "xgboost-model").write_bytes(pickle.dumps(booster))
    parameters = {"SAGEMAKER_SUBMIT_DIRECTORY": str(FOLDER)}
    config = ModelConfig("m", "sagemaker", default_model_filename="booster.py", parameters=parameters)
    handler = ScriptHandler.load(config, directory / "booster.py", CPU, "m_0_0")
    body = Loaded(handler).body(as_csv(ROWS[:2]), CSV, CSV).decode()
    handler.close()

    expected = booster.predict(xgboost.DMatrix(ROWS[:2]))
    np.testing.assert_allclose(np.loadtxt(io.StringIO(body), delimiter=","), expected, rtol=1e-6)


def test_types_that_it_neither_reads_nor_writes_are_refused(bare):
    """With the statuses that tell."""
    loaded = bare()

    unread = loaded.refused(b"x", "application/x-parquet")
    assert unread.kind is Kind.UNSUPPORTED_MEDIA_TYPE
    assert (
        "reads text/libsvm, text/x-libsvm, application/x-recordio-protobuf, application/json, text/csv,"
        in unread.message
    )
    unwritten = loaded.refused(as_csv(ROWS[:1]), CSV, "image/png")
    assert unwritten.kind is Kind.NOT_ACCEPTABLE
    assert "writes text/csv, application/json and application/jsonlines;" in unwritten.message


def test_a_file_that_is_no_booster_says_so(scripts):
    """In the library's words."""
    error = scripts.refused("", files={"xgboost-model": b"{no booster"})

    assert error.kind is Kind.INVALID_MODEL
    assert "model 'm' failed while model_fn ran" in error.message


@pytest.mark.parametrize("source", ["", PICKLED])
def test_a_script_of_model_fn_or_less_is_enough(scripts, source):
    """The default functions read rows as XGBoost's matrices, and write JSON."""
    loaded = scripts.load(source, files={"xgboost-model": saved("pickle")})

    np.testing.assert_allclose(loaded.told(as_csv(ROWS[:2]), CSV), EXPECTED, rtol=1e-6)
    np.testing.assert_allclose(loaded.told(as_svm(ROWS[:2]), SVM), EXPECTED, rtol=1e-6)


def test_trees_behind_the_best_round_do_not_count(scripts):
    """Where the booster knows which that was."""
    booster = BOOSTER.copy()
    booster.set_attr(best_iteration="0")
    loaded = scripts.load("", files={"xgboost-model": pickle.dumps(booster)})

    expected = BOOSTER.predict(xgboost.DMatrix(ROWS[:2]), iteration_range=(0, 1))
    np.testing.assert_allclose(loaded.told(as_csv(ROWS[:2]), CSV), expected, rtol=1e-6)


@pytest.mark.parametrize("objective", ["reg:squarederror", "multi:softmax", "multi:softprob"])
def test_boosters_of_a_cross_validation_are_one_model(scripts, objective):
    """Their mean is the answer, or the class that most of them say, the least of those that as many say."""
    labels, settings = (ROWS[:, 0] * 3).astype(int), {"max_depth": 2, "objective": objective}
    settings |= {"num_class": 3} if objective.startswith("multi") else {}
    folds = [xgboost.train(settings, xgboost.DMatrix(ROWS[at::4], labels[at::4]), 2) for at in range(4)]
    files = {f"xgboost-model-{at}": pickle.dumps(fold) for at, fold in enumerate(folds)}
    loaded = scripts.load("", files=files)

    each = np.array([fold.predict(xgboost.DMatrix(ROWS)) for fold in folds])
    expected = each.mean(0)
    if objective == "multi:softmax":
        expected = [np.bincount(column).argmax() for column in each.astype(int).T]
    np.testing.assert_allclose(loaded.told(as_csv(ROWS), CSV), expected, rtol=1e-5)


@pytest.mark.parametrize("folds", [1, 3])
def test_answers_hold_what_was_chosen(scripts, request, folds):
    """For a model that is its file alone, or that of each fold."""
    settings = {"max_depth": 2, "objective": "multi:softprob", "num_class": 3}
    made = [
        xgboost.train(settings, xgboost.DMatrix(ROWS[at:], (ROWS[at:, 0] * 3).astype(int)), 2) for at in range(folds)
    ]
    directory = scripts.root / "chosen"
    directory.mkdir()
    for at, booster in enumerate(made):
        (directory / f"xgboost-model-{at}").write_bytes(bytes(booster.save_raw("ubj")))
    parameters = {
        "SAGEMAKER_SUBMIT_DIRECTORY": str(FOLDER),
        "SAGEMAKER_INFERENCE_OUTPUT": "labels,predicted_label,probabilities",
    }
    config = ModelConfig("m", "sagemaker", default_model_filename="booster.py", parameters=parameters)
    handler = ScriptHandler.load(config, directory / "booster.py", CPU, "m_0_0")
    request.addfinalizer(handler.close)
    expected = np.mean([booster.predict(xgboost.DMatrix(ROWS[:4])) for booster in made], axis=0)

    rows = Loaded(handler).told(as_csv(ROWS[:4]), CSV)["predictions"]
    np.testing.assert_allclose([row["probabilities"] for row in rows], expected, rtol=1e-6)
    assert [row["predicted_label"] for row in rows] == expected.argmax(1).tolist()
    assert all(row["labels"] == [0, 1, 2] for row in rows)
    lines = Loaded(handler).body(as_csv(ROWS[:4]), CSV, "text/csv").decode().split("\n")
    assert [line.split('",')[0] for line in lines] == ['"[0, 1, 2]'] * 4


def test_a_script_of_the_xgboost_container_runs_as_it_is(scripts):
    """Its encoder is there without the package, and what trains in the same file is imported, too."""
    loaded = scripts.load(
        """
        import json, os, pickle as pkl
        import numpy as np
        from sagemaker_containers import entry_point
        from sagemaker_xgboost_container import distributed
        from sagemaker_xgboost_container.data_utils import get_dmatrix
        import sagemaker_xgboost_container.encoder as xgb_encoders

        def model_fn(model_dir):
            with open(os.path.join(model_dir, "xgboost-model"), "rb") as f:
                return pkl.load(f)

        def input_fn(request_body, request_content_type):
            if request_content_type == "text/libsvm":
                return xgb_encoders.libsvm_to_dmatrix(request_body)
            if request_content_type == "text/csv":
                return xgb_encoders.csv_to_dmatrix(request_body.rstrip("\\n"), dtype=float)
            return xgb_encoders.decode(request_body, request_content_type)

        def predict_fn(input_data, model):
            prediction = model.predict(input_data)
            contributions = model.predict(input_data, pred_contribs=True, validate_features=False)
            return np.hstack((prediction[:, np.newaxis], contributions))

        def output_fn(predictions, content_type):
            if content_type == "text/csv":
                return ",".join(str(x) for x in predictions[0])
            raise ValueError("Content type {} is not supported.".format(content_type))
        """,
        files={"xgboost-model": saved("pickle")},
    )
    for body, content_type in [(as_svm(ROWS[:1]), SVM), (as_csv(ROWS[:1]), CSV), (as_svm(ROWS[:1]), "text/x-libsvm")]:
        values = [float(value) for value in loaded.body(body, content_type, CSV).decode().split(",")]
        np.testing.assert_allclose(values[0], EXPECTED[0], rtol=1e-6)
        assert len(values) == 5
