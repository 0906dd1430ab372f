"""Which framework a model's processes are forked with: by what its code imports, and whether it could tell."""

import textwrap
from pathlib import Path

import pytest

from model_handlers.python import preload
from tests.frameworks import framework

pytest.importorskip("sklearn")
SCIKIT_LEARN = preload.SCIKIT_LEARN

CODE = {
    "it is imported": ("import sklearn", SCIKIT_LEARN),
    "a part of it is": ("from sklearn.svm import SVC", SCIKIT_LEARN),
    "what unpickles it is": ("import joblib", SCIKIT_LEARN),
    "it is imported late": ("def model_fn(model_dir):\n    import joblib", SCIKIT_LEARN),
    "nothing is": ("import json", ""),
    "a neighbour of that name is": ("from .sklearn import x", ""),
    "variables are read": (
        "import os, joblib\nX = os.environ.get('A'), os.environ['B'], 'C' in os.environ",
        SCIKIT_LEARN,
    ),
    "paths are made": ("import os, joblib\nX = os.path.join('a', 'b')", SCIKIT_LEARN),
    "a variable is set": ("import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport sklearn", ""),
    "one is set if it was not": ("import os\nos.environ.setdefault('A', '1')\nimport sklearn", ""),
    "one is removed": ("import os\ndel os.environ['A']\nimport sklearn", ""),
    "variables have another name": ("from os import environ as e\ne['A'] = '1'\nimport sklearn", ""),
    "they are handed on": ("import os, sklearn\nf(os.environ)", ""),
    "a file of variables is read": ("from dotenv import load_dotenv\nimport sklearn", ""),
    "modules come from elsewhere": ("import sys\nsys.path.insert(0, '/opt/mine')\nimport sklearn", ""),
    "from elsewhere by another name": ("from sys import path\nimport sklearn", ""),
    "it is no Python": ("import sklearn\ndef", ""),
}


@pytest.mark.parametrize("what", CODE)
def test_code_tells(tmp_path, what):
    """What is imported, and nothing where the code might change how."""
    source, expected = CODE[what]
    file = tmp_path / "inference.py"
    file.write_text(source)
    assert preload.preload_for(file, [tmp_path]) == expected


@pytest.mark.parametrize(
    ("neighbour", "source", "expected"),
    [
        ("helper.py", "import sklearn", SCIKIT_LEARN),
        ("helper.py", "import sys\nsys.path.append('/x')", ""),
        ("numpy.py", "", ""),
        ("packaging/__init__.py", "", ""),
        (".numpy.py", "", SCIKIT_LEARN),
        ("numpy/weights.npy", "", SCIKIT_LEARN),
    ],
)
def test_what_lies_beside_it_tells_too(tmp_path, neighbour, source, expected):
    """A helper's imports count; what hides an installed package has to go on doing so."""
    (tmp_path / "code").mkdir()
    file = tmp_path / "code/inference.py"
    file.write_text("import helper" if neighbour == "helper.py" else "import joblib")
    (tmp_path / neighbour).parent.mkdir(exist_ok=True)
    (tmp_path / neighbour).write_text(source)
    assert preload.preload_for(file, [file.parent, tmp_path]) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import sklearn", SCIKIT_LEARN),
        ("import os, sklearn\nos.environ['SKLEARN_ASSUME_FINITE'] = '1'", ""),
        ("import another\nimport sklearn", ""),
    ],
)
def test_packages_of_its_own_tell_too(tmp_path, source, expected):
    """Those that it imports, or that they import: settings are often made there, before a framework is imported."""
    for place, text in {
        "model.py": "from mine.deep import settings\nimport joblib",
        "mine/__init__.py": "",
        "mine/deep/settings.py": source,
        "another/settings.py": "from os import environ",
        "unused/settings.py": "from os import environ",
    }.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(text)
    assert preload.preload_for(tmp_path / "model.py", [tmp_path]) == expected


def test_a_large_package_of_its_own_is_not_read(tmp_path):
    """Who can't know leaves it alone."""
    (tmp_path / "mine").mkdir()
    for number in range(100):
        (tmp_path / f"mine/part{number}.py").touch()
    (tmp_path / "model.py").write_text("import mine, sklearn")
    assert not preload.preload_for(tmp_path / "model.py", [tmp_path])


@pytest.mark.parametrize(("neighbour", "expected"), [("config.json", SCIKIT_LEARN), ("sklearn.py", "")])
def test_what_a_script_of_ours_imports_is_known(tmp_path, neighbour, expected):
    """Unless the model brings its own."""
    (tmp_path / neighbour).touch()
    assert preload.preload_for(Path(preload.__file__), [tmp_path], "sklearn") == expected


def test_the_larger_one_is_chosen(tmp_path):
    """Of several frameworks the first in the list brings most."""
    framework("torch")
    file = tmp_path / "model.py"
    file.write_text("import sklearn\nimport torch")
    assert preload.preload_for(file, [tmp_path]) == preload.PYTORCH


@pytest.mark.parametrize(
    ("source", "imports", "expected"),
    [
        ("import json", preload.SAVED_MODEL, preload.TENSORFLOW),
        ("import tensorflow", preload.SAVED_MODEL, ""),
        ("from tensorflow.keras.models import load_model", "", ""),
        ("import keras", preload.SAVED_MODEL, ""),
    ],
)
def test_tensorflow_without_keras_is_for_saved_models_alone(tmp_path, source, imports, expected):
    """Code that imports TensorFlow would find no modules of Keras in it."""
    framework("tensorflow")
    file = tmp_path / "inference.py"
    file.write_text(source)
    assert preload.preload_for(file, [tmp_path], imports) == expected


def test_what_is_not_installed_is_left_to_the_model(tmp_path):
    """Whose error says so."""
    file = tmp_path / "model.py"
    file.write_text(textwrap.dedent("import no_such_framework, joblib_of_another_name"))
    assert not preload.preload_for(file, [tmp_path])
