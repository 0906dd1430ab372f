"""Models of trees: real ones, trained here, by the libraries that serve them."""

import base64
import importlib
import json
import logging
import os
import re
import sys
import threading
import time
import zlib

import numpy as np
import pytest

from model_handlers.base import CPU
from model_handlers.config.model_config import ModelConfig
from model_handlers.errors import Kind, MmeError
from model_handlers.system.threads import Threads
from model_handlers.tensor import FP32, FP64, TensorSpec
from model_handlers.trees import TreesHandler
from model_handlers.trees import handler as trees
from tests.frameworks import framework_later

xgboost = framework_later("xgboost")
lightgbm = framework_later("lightgbm")
treelite = framework_later("treelite")
sklearn_ensemble = framework_later("sklearn.ensemble")

RNG = np.random.default_rng(7)
ROWS = RNG.normal(size=(200, 5)).astype(np.float32)
SIGN = (ROWS[:, 0] + ROWS[:, 1] > 0).astype(int)
THREE = (ROWS[:, 2] > 0).astype(int) + (ROWS[:, 3] > 0)
VALUE = ROWS[:, 0] * 3 + ROWS[:, 4]
# Three trees of depth 2 over three features, objective binary:logistic, as XGBoost 1.7.6 wrote them; it is the last
# but one that could, and those installed today can't read it either.
LEGACY = base64.b64decode(
    "eNpLysxLY2BgsGdmgABGJJodSsPEaA34oXRSZl5iUaVVTn56ZnFJZjIbVDg9qaQoNZWZjg4iB4DcxorEZx4EbvoPBCB3MUHc1/DBON4eyGwAuY0F"
    "KtbDuHwvTC0IgNjr3R/ageSQxf79+bOPEU3dpgms+1QyVzgyMBQAscF+kNgM/zQHBgYXx/zU+fsRLjFw2LN7tz2C/8Hh8qVLSPIzHC7PvrcPOQEO"
    "5nC0i9ZACUcQe8cpKbD/QGkAmnIbfjzi2o8ejn3H9mOEo1RKly0TmjqHSlaQGIo6toq9diz7ghxFp6Q5Jj9hBodfT0GgQ/NWHUezyDZI+N/Ot/eo"
    "Sndw0yyDh3fCOlFHxQuI+BCx3GF/dVmaHYyfbDXbfn/JPVsYX/yupAPrk7n2QyU+1NWm2xETH/+MODDio2vOZoz4YGROwogP7bOH96LHx3XfA3ad"
    "n/kd2cxCHZkKjoPTr80lTYdn77kdD5wsAoc394sMB/ueSQ7xfBrw+Cj0fekgu3YqPD7yPHfZXwu3gcfHlPNf7H9qLd4H42/doOVw12GBPXo4wOKC"
    "D1aAphaXxGeWpBYllmTm58FKSyMBZOk8UGEan5OZm1kCU2DMCWXkJ2WlJpdklqW6QAWqlfISc1OVrJTQimYlHaWi1PT4nPzi4viCxKLEXCWraqXi"
    "5MSc1PiC/OL48tTM9IwSoDZDpdpaAOqKEpI="
)
LEGACY_ROWS = np.array([[0, 0, 0], [1, 1, 0], [-1, -1, 1], [0.5, -2, 0]], np.float32)
LEGACY_SCORES = [0.2982175648212433, 0.7659621834754944, 0.22802741825580597, 0.22802741825580597]


def boosted(objective, target, **parameters):
    """A booster of XGBoost."""
    options = {"max_depth": 3, "objective": objective, "nthread": 1, "verbosity": 0, **parameters}
    return xgboost.train(options, xgboost.DMatrix(ROWS, target), 4)


def gradient_boosted(objective, target, **parameters):
    """A booster of LightGBM."""
    options = {"objective": objective, "num_leaves": 7, "verbose": -1, "num_threads": 1, "min_data_in_leaf": 5}
    return lightgbm.train({**options, **parameters}, lightgbm.Dataset(ROWS, target), 4)


@pytest.fixture(autouse=True, scope="module")
def threads_of_openmp():
    """As many as there are: PyTorch, which shares OpenMP with treelite, may have left this process one."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(os.cpu_count())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Model files by name, and what their libraries predict for ROWS."""
    folder = tmp_path_factory.mktemp("trees")
    files, predictions = {}, {}

    def keep(name, save, predicted):
        files[name] = folder / name
        save(files[name])
        rows = np.asarray(predicted, np.float32).reshape(len(ROWS), -1)
        predictions[name] = rows if rows.shape[1] > 1 else rows[:, 0]

    matrix = xgboost.DMatrix(ROWS)
    models = {
        "binary": boosted("binary:logistic", SIGN),
        "softprob": boosted("multi:softprob", THREE, num_class=3),
        "softmax": boosted("multi:softmax", THREE, num_class=3),
        "regression": boosted("reg:squarederror", VALUE),
        "dart": boosted("binary:logistic", SIGN, booster="dart"),
    }
    for name, booster in models.items():
        for suffix in ("json", "ubj"):
            keep(f"{name}.{suffix}", booster.save_model, booster.predict(matrix))
    keep("forest.tl", treelite.frontend.from_xgboost(models["softprob"]).serialize, models["softprob"].predict(matrix))
    light = {
        "binary": gradient_boosted("binary", SIGN),
        "multiclass": gradient_boosted("multiclass", THREE, num_class=3),
        "regression": gradient_boosted("regression", VALUE),
    }
    for name, booster in light.items():
        keep(f"{name}.txt", booster.save_model, booster.predict(ROWS))
    random_forest = sklearn_ensemble.RandomForestClassifier(5, max_depth=3, random_state=0).fit(ROWS, THREE)
    keep("sklearn.tl", treelite.sklearn.import_model(random_forest).serialize, random_forest.predict_proba(ROWS))
    return files, predictions


@pytest.fixture
def load(trained):
    """Loads a trained model, or a file, with parameters; closes it afterwards."""
    loaded = []

    def load(name, max_batch_size=256, inputs=(), outputs=(), **parameters):
        config = ModelConfig("m", "fil", max_batch_size, inputs, outputs, parameters=parameters)
        loaded.append(TreesHandler.load(config, trained[0].get(name, name), CPU))
        return loaded[-1]

    yield load
    for handler in loaded:
        handler.close()


def output(handler, rows=ROWS):
    """What it answers."""
    (array,) = handler.execute({"input__0": rows}, ["output__0"])
    assert array.dtype == np.float32
    return array


NAMES = [
    *(
        f"{name}.{suffix}"
        for name in ("binary", "softprob", "softmax", "regression", "dart")
        for suffix in ("json", "ubj")
    ),
    "binary.txt",
    "multiclass.txt",
    "regression.txt",
    "forest.tl",
    "sklearn.tl",
]


@pytest.mark.parametrize("name", NAMES)
def test_values_are_the_librarys_own(load, trained, name):
    """One row, all rows, and a few of them get what the library that made the model predicts for them."""
    handler, expected = load(name), trained[1][name]

    for rows in (slice(0, 1), slice(None), slice(3, 10)):
        np.testing.assert_allclose(output(handler, ROWS[rows]), expected[rows], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["binary.json", "softprob.ubj", "regression.json", "multiclass.txt", "binary.txt"])
def test_treelite_stands_in_for_a_library_that_is_not_there(load, trained, monkeypatch, name):
    """Without XGBoost and LightGBM their models are computed by treelite, to the same values."""
    monkeypatch.setattr(trees, "is_installed", lambda _: False)
    handler = load(name)

    assert any(isinstance(each, trees.TreeliteForest) for each in vars(handler).values())
    np.testing.assert_allclose(output(handler), trained[1][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["softprob.ubj", "multiclass.txt", "forest.tl"])
def test_threads_compute_at_the_same_time(load, trained, name):
    """Several lanes share the trees, and each gets the answers to its own rows."""
    handler, expected, wrong = load(name, cpu_nthread="2"), trained[1][name], []

    def run(index):
        own = slice(index * 20, index * 20 + 20)
        wrong.extend(_ for _ in range(50) if not np.allclose(output(handler, ROWS[own]), expected[own], rtol=1e-5))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []


def test_a_failure_is_raised_once_no_part_computes_any_more():
    """The trees may be given back then, which the other threads would still read."""
    crew, caller = trees.Crew(Threads(2), "m"), threading.current_thread()
    begun, failing, ended = threading.Event(), threading.Event(), []

    def compute(part):
        if threading.current_thread() is caller:
            failing.set()
            assert begun.wait(10)
            raise ValueError("no trees")
        begun.set()
        assert failing.wait(10)
        time.sleep(0.05)
        ended.append(len(part))
        return part

    with pytest.raises(ValueError, match="no trees"):
        crew.compute(compute, np.zeros((256, 1)))

    assert ended == [128]
    crew.close()


def test_the_binary_of_older_versions_is_read(load, tmp_path):
    """`model_type: "xgboost"` reads what XGBoost wrote before it had JSON, to the values that it predicted then."""
    file = tmp_path / "xgboost.model"
    file.write_bytes(zlib.decompress(LEGACY))

    np.testing.assert_allclose(output(load(file, model_type="xgboost"), LEGACY_ROWS), LEGACY_SCORES, rtol=1e-6)


def test_a_file_of_any_name_is_known_by_its_content(load, trained, tmp_path):
    """XGBoost writes UBJSON, or JSON, under whatever name it is given: `xgboost.model` is both."""
    for source in ("binary.json", "binary.ubj"):
        file = tmp_path / "xgboost.model"
        file.write_bytes(trained[0][source].read_bytes())

        np.testing.assert_allclose(output(load(file)), trained[1][source], rtol=1e-6)


# -- parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["binary.json", "binary.txt"])
@pytest.mark.parametrize("parameter", ["output_class", "is_classifier"])
@pytest.mark.parametrize(("threshold", "limit"), [({}, 0.5), ({"threshold": "0.45"}, 0.45)])
def test_a_classifier_of_two_classes_compares_with_the_threshold(load, trained, name, parameter, threshold, limit):
    """The class is 1 where the score is beyond the threshold, which is a half unless it is said."""
    found = output(load(name, **{parameter: "true"}, **threshold))

    np.testing.assert_array_equal(found, trained[1][name] > limit)
    assert 0 < found.sum() < len(ROWS)


@pytest.mark.parametrize("name", ["softprob.json", "softmax.json", "multiclass.txt", "forest.tl", "sklearn.tl"])
def test_a_classifier_of_several_classes_answers_the_best_one(load, trained, name):
    """One number a row: the class with the highest score, which is what softmax predicts by itself."""
    scores = trained[1][name]

    expected = scores if scores.ndim == 1 else scores.argmax(axis=1)
    np.testing.assert_array_equal(output(load(name, output_class="true")), expected)


@pytest.mark.parametrize("name", ["binary.json", "binary.txt"])
def test_probabilities_of_two_classes_are_two_numbers(load, trained, name):
    """`predict_proba` has a binary model tell both classes' scores, which make one together."""
    handler, score = load(name, output_class="true", predict_proba="true"), trained[1][name]

    assert handler.config.outputs == (TensorSpec("output__0", FP32, (2,)),)
    np.testing.assert_allclose(output(handler), np.stack([1 - score, score], axis=1), rtol=1e-6)


@pytest.mark.parametrize("name", ["softmax.json", "softprob.json"])
def test_probabilities_of_several_classes(load, trained, name):
    """`predict_proba` tells every class's score, of a model too that predicts the class by itself."""
    np.testing.assert_allclose(output(load(name, predict_proba="true")), trained[1]["softprob.json"], rtol=1e-6)


def test_contributions_are_told_where_they_are_declared(load, trained):
    """`treeshap_output` is what each feature contributed, the bias last: together they are the score before its sigmoid."""
    spec = TensorSpec("treeshap_output", FP32, (6,))
    for name in ("binary.json", "binary.txt"):
        handler = load(name, outputs=(TensorSpec("output__0", FP32, (1,)), spec))
        scores, shares = handler.execute({"input__0": ROWS}, ["output__0", "treeshap_output"])

        np.testing.assert_allclose(1 / (1 + np.exp(-shares.sum(axis=1))), scores, rtol=1e-4)
        np.testing.assert_allclose(scores, trained[1][name], rtol=1e-6)


def test_contributions_need_the_models_own_library(load):
    """A checkpoint is computed by treelite, which has none."""
    outputs = (TensorSpec("output__0", FP32, (3,)), TensorSpec("treeshap_output", FP32, (18,)))
    with pytest.raises(MmeError, match="'treeshap_output' needs the library that made the model"):
        load("forest.tl", outputs=outputs)


def test_parameters_that_tune_fil_are_logged_as_harmless(load, caplog):
    """What FIL does with memory and GPUs changes nothing here; what nobody knows is said to be unknown."""
    with caplog.at_level(logging.WARNING, "mme.trees"):
        load("binary.json", storage_type="AUTO", algo="ALGO_AUTO", foo="1", MME_PIN="true")

    said = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in said] == [
        "parameter 'algo' changes nothing",
        "parameter 'storage_type' changes nothing",
        "parameters without effect on models of trees",
    ]
    assert said[-1].endswith(": 'foo'")


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"model_type": "catboost"}, "parameter 'model_type' must be one of xgboost, xgboost_json, xgboost_ubj, "),
        ({"output_class": "maybe"}, "parameter 'output_class' must be 'true' or 'false', got 'maybe'"),
        ({"threshold": "high"}, "parameter 'threshold' must be a number, got 'high'"),
        ({"cpu_nthread": "-1"}, "parameter 'cpu_nthread' must be an integer from 0 to 1024, got '-1'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_parameter_that_is_not_what_it_should_be_is_named(load, parameters, sentence):
    """The model is invalid, and the sentence has the parameter and its value."""
    with pytest.raises(MmeError) as caught:
        load("binary.json", **parameters)

    assert caught.value.kind is Kind.INVALID_MODEL
    assert sentence in caught.value.message


def test_probabilities_of_no_classes_are_refused(load):
    """A regression has none."""
    with pytest.raises(MmeError, match="this model knows no classes"):
        load("regression.json", predict_proba="true")


# -- configurations --------------------------------------------------------------------------------------------------


def test_the_file_completes_the_configuration(trained):
    """Features and classes come from the file, and batches are as large as FIL's users have them."""
    config = TreesHandler.autocomplete(ModelConfig("m", "fil"), trained[0]["softprob.json"])

    assert config.inputs == (TensorSpec("input__0", FP32, (5,)),)
    assert config.outputs == (TensorSpec("output__0", FP32, (3,)),)
    assert config.max_batch_size == 32768
    assert config.dynamic_batching is not None


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        (
            (TensorSpec("input__0", FP32, (7,)),),
            "its trees take 5 features, but config.pbtxt declares input 'input__0'",
        ),
        ((TensorSpec("input__0", FP64, (5,)),), "configuration expects datatype TYPE_FP64 for input 'input__0', model"),
        ((TensorSpec("rows", FP32, (5,)),), "unexpected inference input 'rows', allowed inputs are: input__0"),
    ],
    ids=["features", "type", "name"],
)
def test_a_configuration_that_disagrees_with_the_file_is_refused(load, inputs, sentence):
    """The wrong number of features, another type, another name: one sentence each."""
    with pytest.raises(MmeError) as caught:
        load("binary.json", inputs=inputs)

    assert caught.value.kind is Kind.INVALID_MODEL
    assert sentence in caught.value.message


# -- on trial -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_whole_files_stand_their_trial(trained, name):
    """Of every kind; so do trees with splits by category, and those whose library is not there."""
    TreesHandler.try_load(ModelConfig("m", "fil"), trained[0][name])


@pytest.mark.parametrize("name", ["softprob.ubj", "multiclass.txt"])
def test_files_stand_their_trial_by_treelite(trained, name, monkeypatch):
    """Which stands in."""
    monkeypatch.setattr(trees, "is_installed", lambda _: False)
    TreesHandler.try_load(ModelConfig("m", "fil"), trained[0][name])


def test_trees_with_categories_stand_their_trial(tmp_path):
    """Their splits have sets of categories, and are looked through as well."""
    rows = ROWS.copy()
    rows[:, 0] = RNG.integers(0, 9, len(rows))
    options = {"objective": "regression", "min_data_in_leaf": 2, "verbose": -1, "num_threads": 1}
    data = lightgbm.Dataset(rows, VALUE + (rows[:, 0] % 3) * 9, categorical_feature=[0])
    lightgbm.train({**options, "max_cat_to_onehot": 1, "min_data_per_group": 1}, data, 4).save_model(tmp_path / "a.txt")
    assert "cat_boundaries" in (tmp_path / "a.txt").read_text()
    matrix = xgboost.DMatrix(rows, VALUE, feature_types=["c", *"qqqq"], enable_categorical=True)
    xgboost.train({"max_depth": 3, "nthread": 1, "max_cat_to_onehot": 1}, matrix, 4).save_model(tmp_path / "a.ubj")
    for name in ("a.txt", "a.ubj"):
        TreesHandler.try_load(ModelConfig("m", "fil"), tmp_path / name)


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("binary.ubj", lambda data: astray(data, b"left_children[$l#L"), "children in tree 0 are from"),
        ("binary.ubj", lambda data: astray(data, b"split_indices[$l#L"), "features that tree 0 asks for are from"),
        (
            "softprob.ubj",
            lambda data: data.replace(b"i\x02i\x00i\x01i\x02", b"i\x07i\x00i\x01i\x02"),
            "classes of trees",
        ),
        ("binary.txt", lambda data: re.sub(rb"left_child=\S+", b"left_child=99", data, count=1), "tree_sizes"),
    ],
)
def test_trees_that_are_none_do_not(trained, tmp_path, name, change, sentence):
    """Though their library loads them."""
    file = tmp_path / f"bad{trained[0][name].suffix}"
    file.write_bytes(change(trained[0][name].read_bytes()))
    with pytest.raises(MmeError) as caught:
        TreesHandler.try_load(ModelConfig("m", "fil"), file)

    assert caught.value.kind is Kind.INVALID_MODEL
    assert sentence in caught.value.message


def astray(data, array):
    """The first number of an array of UBJSON is a million."""
    at = data.index(array) + len(array) + 8
    return data[:at] + (1_000_000).to_bytes(4, "big") + data[at + 4 :]


# -- bad files -------------------------------------------------------------------------------------------------------


def newer_xgboost(data):
    """The JSON of a model as if XGBoost 97 had written it."""
    return json.dumps({**json.loads(data), "version": [97, 1, 0]}).encode()


def newer_ubj(data):
    """The same of UBJSON, whose last bytes are the three numbers."""
    head, _, tail = data.rpartition(b"version")
    return head + b"version" + tail.replace(b"i\x03i\x02i\x00", b"i\x61i\x01i\x00")


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("binary.json", newer_xgboost, "was written by XGBoost 97.1.0, and 3.2.0 is installed here"),
        ("binary.ubj", newer_ubj, "was written by XGBoost 97.1.0, and 3.2.0 is installed here"),
        ("binary.txt", lambda data: data.replace(b"version=v4", b"version=v9"), "is in version v9 of LightGBM's text"),
        ("forest.tl", lambda data: b"\x61\0\0\0" + data[4:], "was written by treelite 97."),
        ("forest.tl", lambda _: b"nonsense" * 9, "is no treelite checkpoint"),
        ("forest.tl", lambda data: data[:200], "treelite can't read 'bad.tl' as treelite_checkpoint: "),
        ("binary.json", lambda data: data[: len(data) // 2], "xgboost can't read 'bad.json' as xgboost_json: "),
        ("binary.ubj", lambda data: data[: len(data) // 2], "is no complete model of XGBoost in UBJSON"),
        ("binary.ubj", lambda data: data[50:], "xgboost can't read 'bad.ubj' as xgboost_ubj: "),
        ("binary.txt", lambda data: data[: len(data) // 2], "is no complete model of LightGBM in text"),
        ("binary.txt", lambda _: b"", "is no complete model of LightGBM in text"),
        ("binary.json", lambda _: b"not a model", "xgboost can't read 'bad.json' as xgboost_json: "),
    ],
    ids=["newer json", "newer ubj", "newer text", "newer checkpoint", "no checkpoint", "cut checkpoint", "cut json",
         "cut ubj", "beheaded ubj", "cut text", "empty text", "no json"],
)  # fmt: skip
def test_a_bad_file_is_one_sentence(load, trained, tmp_path, capfd, name, change, sentence):
    """Files of versions that are not known here, cut short, or something else: INVALID_MODEL, in one line, by name.

    Nothing is written where log lines are.
    """
    file = tmp_path / f"bad{trained[0][name].suffix}"
    file.write_bytes(change(trained[0][name].read_bytes()))
    with pytest.raises(MmeError) as caught:
        load(file)

    assert caught.value.kind is Kind.INVALID_MODEL
    assert sentence in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 500
    assert capfd.readouterr() == ("", "")


def test_a_linear_model_is_no_model_of_trees(load, tmp_path):
    """XGBoost's linear booster is refused with what to do instead."""
    file = tmp_path / "xgboost.json"
    boosted("reg:squarederror", VALUE, booster="gblinear", max_depth=0).save_model(file)
    with pytest.raises(MmeError, match="is linear"):
        load(file)


def test_a_library_that_is_missing_is_told_with_its_extra(monkeypatch, trained):
    """Where none of the libraries is installed the sentence says what to install."""
    monkeypatch.setattr(trees, "is_installed", lambda _: False)
    monkeypatch.setitem(sys.modules, "treelite", None)
    trees.imported.cache_clear()
    with pytest.raises(MmeError) as caught:
        TreesHandler.traits(ModelConfig("m", "fil"), trained[0]["binary.json"]).runtime.provide()

    assert caught.value.kind is Kind.UNSUPPORTED
    assert "needs treelite, which is not installed; run `pip install 'mme[trees]'`" in caught.value.message
    trees.imported.cache_clear()


def test_a_library_that_the_system_lacks_something_for_is_told_by_its_model_alone(monkeypatch):
    """LightGBM without libgomp: its models say what is missing, and the others' processes start."""

    def import_without(name, *_):
        if name == "lightgbm":
            raise OSError("libgomp.so.1: cannot open shared object file")
        return importlib.import_module(name)

    monkeypatch.setattr(trees, "import_without", import_without)
    trees.imported.cache_clear()
    trees.preload()
    with pytest.raises(MmeError, match=r"needs lightgbm, which can't be imported \(libgomp\.so\.1: ") as caught:
        trees.imported("lightgbm")

    assert caught.value.kind is Kind.UNSUPPORTED
    assert trees.imported("xgboost").Booster is xgboost.Booster
    trees.imported.cache_clear()
