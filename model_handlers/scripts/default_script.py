"""Models that take the body of a request as it came, and the script for those that need none in Amazon's containers.

SageMaker's own containers hand a script the body and its content type, and answer what the script makes of them. Here
such a model is an ordinary one with a tensor of bytes on both sides; content type and Accept header are parameters of
request and response, so that every protocol can ask it. Default scripts are told by the names of a model's files, lie
in `built_in`, and are imported as a customer's would be.
"""

from __future__ import annotations

from pathlib import Path

BODY = "BODY"  # both tensors, UINT8: so many bytes
CONTENT_TYPE = "content_type"  # of the request's body, and of the response's
ACCEPT = "accept"  # what the client would like the response to be
CUSTOM_ATTRIBUTES = "custom_attributes"  # X-Amzn-SageMaker-Custom-Attributes of the request
SESSION_ID = "session_id"  # of the stateful session that the request is of
DEFAULT_TYPE = "application/json"

# Parameters of a configuration, by the variables that Amazon's containers have for them: the type of answers to clients
# that do not say what they accept, and the folder of a script that is not in its model's archive.
DEFAULT_ACCEPT = "SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT"
SUBMIT_DIRECTORY = "SAGEMAKER_SUBMIT_DIRECTORY"

# A parameter by the name of the setting: how JSON says what is no finite number, where that is not null.
NONFINITE = "MME_JSON_NONFINITE"
LITERAL = "literal"  # NaN, Infinity and -Infinity, as Triton and Python write them


FOLDER = Path(__file__).parent / "built_in"
BOOSTER = "booster.py"
PIPELINE = "pipeline.py"
SAVED_MODEL = "saved_model.py"
LINES = "SAGEMAKER_BATCH"  # a parameter of models whose answers are put together line by line
SELECTED = "SAGEMAKER_INFERENCE_OUTPUT"  # another, by the variable of Amazon's container: what an answer holds
SELECTABLE = (
    "predicted_label",
    "labels",
    "probability",
    "probabilities",
    "raw_score",
    "raw_scores",
    "predicted_score",
)  # what it may be
TASK = "HF_TASK"  # a parameter of models, by the variable that Amazon's container has for it
DEFAULT = "SAGEMAKER_TFS_DEFAULT_MODEL_NAME"  # the same

_BOOSTER_FILES = ("xgboost-model", "xgboost-model-[0-9]*")  # of SageMaker's XGBoost, and of its cross-validation
PICKLED = b"\x80"  # how a pickle begins, and none of XGBoost's own formats
CONFIG_FILE = "config.json"  # of a model that transformers saved, beside its weights
_SAVED_FILE = "saved_model.pb"
_SAVED_PLACES = ("", "*/", "*/*/")  # above the folder of a version: 1/, a-model/1/, export/Servo/1/
_OF_TRITON = ("config.pbtxt", "model.py")  # somewhere above: it has a configuration, or code that reads it itself
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", "tf_model*.h5")


def default_script(directory: Path) -> str:
    """The file name of the script for what lies in a directory, "" for none."""
    if boosters_in(directory):
        return BOOSTER
    if is_saved_pipeline(directory):
        return PIPELINE
    return SAVED_MODEL if saved_models_in(directory) else ""


def boosters_in(directory: Path) -> list[Path]:
    """The files of a model of SageMaker's XGBoost: one, or one for each fold of a cross-validation, in order."""
    return sorted(file for name in _BOOSTER_FILES for file in directory.glob(name) if file.is_file())


def is_pickle(booster: Path) -> bool:
    with booster.open("rb") as file:
        return file.read(1) == PICKLED


def is_saved_pipeline(directory: Path) -> bool:
    saved = (directory / CONFIG_FILE).is_file()
    return saved and any(path for pattern in _WEIGHTS for path in directory.glob(pattern))


def saved_models_in(directory: Path) -> list[Path]:
    """The folders of versions that each hold a SavedModel, in order, as TensorFlow Serving takes them."""
    found = (file.parent for place in _SAVED_PLACES for file in directory.glob(f"{place}[0-9]*/{_SAVED_FILE}"))
    return sorted(folder for folder in found if folder.name.isdecimal() and not _is_of_triton(folder, directory))


def _is_of_triton(version: Path, directory: Path) -> bool:
    above = (each for each in (version, *version.parents) if each.is_relative_to(directory))
    return any((each / name).is_file() for each in above for name in _OF_TRITON)
