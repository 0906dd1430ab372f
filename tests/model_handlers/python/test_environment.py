"""What environment a model asks for, by its parameter and its files; nothing is made to find out."""

import pytest

from model_handlers.config.model_config import ModelConfig
from model_handlers.environment import Prebuilt, Requirements
from model_handlers.errors import Kind, MmeError
from model_handlers.python.handler import PythonHandler
from model_handlers.scripts.host import ScriptHandler

PARAMETER = "EXECUTION_ENV_PATH"


@pytest.fixture
def wants(tmp_path):
    """What a model of these files, and of this value of the parameter, wants; paths below its directory."""

    def wants(*files, parameter=None, handler=PythonHandler, filename=""):
        for name, content in (file if isinstance(file, tuple) else (file, "x") for file in files):
            path = tmp_path / "m" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        parameters = {} if parameter is None else {PARAMETER: parameter}
        config = ModelConfig("m", parameters=parameters, default_model_filename=filename)
        model_file = tmp_path / "m" / ("1" if handler is PythonHandler else ".") / (filename or "model.py")
        return handler.traits(config, model_file).code.environment()

    return wants


@pytest.mark.parametrize("parameter", [None, ""])
def test_nothing_asked_is_nothing_wanted(wants, parameter):
    """The model's process is a fork, with the packages of the server."""
    assert wants(parameter=parameter) is None


@pytest.mark.parametrize(
    ("parameter", "path"),
    [
        ("/envs/a.tar.gz", "/envs/a.tar.gz"),
        ("$$TRITON_MODEL_DIRECTORY/env.tar.gz", "{m}/env.tar.gz"),
        ("$$TRITON_MODEL_DIRECTORY/1/env", "{m}/1/env"),
        ("$$TRITON_MODEL_DIRECTORY/../shared", "{m}/../shared"),
    ],
)
def test_the_parameter_names_one(wants, tmp_path, parameter, path):
    """Wherever it lies: it belongs to whoever runs the server, or came with the model."""
    assert wants(parameter=parameter) == Prebuilt(type(tmp_path)(path.format(m=tmp_path / "m")))


def test_the_parameter_counts_before_requirements(wants):
    """A requirements.txt beside an environment is how that was made."""
    assert isinstance(wants("requirements.txt", parameter="/envs/a.tar.gz"), Prebuilt)


@pytest.mark.parametrize("parameter", ["env", "./env.tar.gz", "$TRITON_MODEL_DIRECTORY/env"])
def test_a_path_has_to_say_where_it_begins(wants, parameter):
    """Where the server was started is nobody's business."""
    with pytest.raises(MmeError, match=f"'{PARAMETER}' is .*; it must be an absolute path or begin with") as raised:
        wants(parameter=parameter)

    assert raised.value.kind is Kind.INVALID_MODEL


@pytest.mark.parametrize(
    ("files", "requirements", "wheels"),
    [
        (["requirements.txt"], "requirements.txt", None),
        (["1/requirements.txt"], "1/requirements.txt", None),
        (["1/requirements.txt", "requirements.txt"], "1/requirements.txt", None),
        (["requirements.txt", "wheels/a.whl"], "requirements.txt", "wheels"),
        (["1/requirements.txt", "wheels/a.whl"], "1/requirements.txt", "wheels"),
        (["1/requirements.txt", "1/wheels/a.whl", "wheels/b.whl"], "1/requirements.txt", "1/wheels"),
        (["1/code/requirements.txt", "1/requirements.txt"], "1/code/requirements.txt", None),
    ],
)
def test_requirements_lie_beside_the_model_or_above_it(wants, tmp_path, files, requirements, wheels):
    """The nearest counts; wheels may lie where requirements may."""
    asked = wants(*files, filename="code/model.py" if "code" in requirements else "")

    assert asked == Requirements(tmp_path / "m" / requirements, wheels and tmp_path / "m" / wheels)


@pytest.mark.parametrize("text", ["", "\n\n", "# numpy\n\n   # torch\n"])
def test_requirements_that_name_nothing_ask_for_nothing(wants, text):
    """Comments are for people."""
    assert wants(("requirements.txt", text)) is None


def test_a_script_brings_them_as_in_sagemakers_containers(wants, tmp_path):
    """Beside the script, in the folder `code`."""
    asked = wants("code/requirements.txt", "code/wheels/a.whl", handler=ScriptHandler, filename="code/inference.py")
    assert asked == Requirements(tmp_path / "m/code/requirements.txt", tmp_path / "m/code/wheels")

    asked = wants(parameter="$$TRITON_MODEL_DIRECTORY/env", handler=ScriptHandler, filename="code/inference.py")
    assert asked == Prebuilt(tmp_path / "m/env")
