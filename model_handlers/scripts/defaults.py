"""What is done for a function that a script does not define, as Amazon's containers do it for each framework.

A TorchScript file is loaded by torch, `xgboost-model` by xgboost, what transformers saved by transformers, and folders
of SavedModels by TensorFlow. Models of torch get and answer tensors, in inference mode; boosters get matrices of their
own; those of scikit-learn get floats and are asked to predict; pipelines of Hugging Face get `inputs` and `parameters`
of a JSON object, SavedModels the JSON of TensorFlow Serving. Which framework it is, the model tells: none is imported
but for a file of its own. A script that predicts itself is given images and sounds as Hugging Face's container gives
them: the others read neither.
"""

from __future__ import annotations

import importlib
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from model_handlers.errors import MmeError, invalid_model
from model_handlers.scripts import tensorflow, xgboost
from model_handlers.scripts.content_types import (
    CSV,
    JSON,
    JSON_LINES,
    WRITES,
    MalformedBodyError,
    UnsupportedFormatError,
    cells_of,
    check_features,
    decode,
    encode,
    features_of,
    floats,
    json_lines,
    media_type,
    not_acceptable,
    place,
    preferred,
    read,
    written,
)
from model_handlers.scripts.default_script import (
    CONFIG_FILE,
    DEFAULT,
    SELECTED,
    TASK,
    boosters_in,
    is_saved_pipeline,
    saved_models_in,
)
from model_handlers.scripts.xgboost import Selection

if TYPE_CHECKING:
    from model_handlers.base import Device
    from model_handlers.scripts.content_types import Reader
    from model_handlers.scripts.host import Context
    from model_handlers.tensor import Array


# How the name of an architecture ends, and what it is for.
_TASKS = {
    "TapasForQuestionAnswering": "table-question-answering",
    "ForQuestionAnswering": "question-answering",
    "ForTokenClassification": "token-classification",
    "ForSequenceClassification": "text-classification",
    "ForImageClassification": "image-classification",
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForConditionalGeneration": "text2text-generation",
}
_ENCODER = "Model"  # the end of the name of one without a head, whose answers are its features
_NO_ENCODERS = ("HeadsModel", "EncoderDecoderModel")
_OF_TEXT = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
_OF_OTHERS = ("preprocessor_config.json", "processor_config.json")  # of images and sounds
_HEADERS = ("inputs", "question", "context")
_MEDIA = ("audio/", "image/")


def load_pipeline(model: str, model_dir: Path, task: str, device: Device) -> Any:
    """The pipeline of the model in a directory; `task` is "" for what its architecture is made for."""
    task = task or _task_of(model, model_dir / CONFIG_FILE)
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise invalid_model(
            f"model '{model}': Please provide a model_fn implementation, or install transformers, in the image or by a "
            f"requirements.txt beside {CONFIG_FILE}: the model would be its pipeline for {task} ({error})"
        ) from None
    where = device.index if device.kind == "gpu" else -1
    return transformers.pipeline(task=task, model=str(model_dir), device=where)


def is_pipeline(model: Any) -> bool:
    return any(each.__module__.partition(".")[0] == "transformers" for each in type(model).__mro__)


def is_media(content_type: object) -> bool:
    """Whether a body of that type is a sound or an image, which Hugging Face's container alone reads."""
    return media_type(content_type).startswith(_MEDIA)


def decoded(body: bytes | str, content_type: object = JSON) -> Any:
    """What a pipeline is asked with: of JSON or its lines, of CSV with a header, an image, a sound, or as any other."""
    kind = media_type(content_type)
    if kind in _READERS:
        return read(body, kind, _READERS)
    if kind.startswith("audio/"):
        return {"inputs": bytes(body) if not isinstance(body, str) else body.encode()}
    if kind.startswith("image/"):
        return {"inputs": _image(body)}
    return decode(body, content_type)


def encoded(prediction: Any, content_type: object = JSON, *, literal: bool = False) -> str | memoryview:
    """A prediction as the body of an answer; in CSV a list of dictionaries is rows below a header. See `encode`."""
    if media_type(content_type) != CSV or not is_rows(prediction):
        return encode(prediction, content_type, literal=literal)
    header = list(prediction[0])
    if any(not row.keys() <= prediction[0].keys() for row in prediction):
        raise ValueError(f"a row has other fields than {', '.join(map(str, header))}")
    return written([header, *([row.get(name) for name in header] for row in prediction)])


def is_rows(prediction: Any) -> bool:
    return isinstance(prediction, list) and bool(prediction) and all(isinstance(row, dict) for row in prediction)


def _lines(body: bytes | str) -> Any:
    # Lines of inputs, or of objects of them, are one question: a pipeline takes one set of parameters.
    lines = json_lines(body)
    objects = [line if isinstance(line, dict) and "inputs" in line else {"inputs": line} for line in lines]
    if any(each.get("parameters") != objects[0].get("parameters") for each in objects):
        raise MalformedBodyError("the lines of the body have to have the same parameters")
    return {**objects[0], "inputs": [each["inputs"] for each in objects]}


def _rows(body: bytes | str) -> dict[str, list[Any]]:
    names, *cells = cells_of(body)
    if not cells or not any(name in _HEADERS for name in names):
        raise MalformedBodyError(f"the body is not {CSV} with a header of {', '.join(_HEADERS)}")
    rows = [dict(zip(names, row, strict=True)) for row in cells]
    return {"inputs": [row["inputs"] for row in rows] if "inputs" in names else rows}


_READERS: dict[str, Reader] = {JSON: json.loads, JSON_LINES: _lines, CSV: _rows}


def _image(body: bytes | str) -> Any:
    try:
        image = importlib.import_module("PIL.Image")
    except ImportError:
        raise UnsupportedFormatError("of an image (Pillow is not installed)") from None
    try:
        return image.open(io.BytesIO(body if isinstance(body, bytes) else body.encode())).convert("RGB")
    except (OSError, ValueError, SyntaxError, image.DecompressionBombError) as error:
        raise MalformedBodyError(f"the body is no image: {error}") from error


def _task_of(model: str, config: Path) -> str:
    try:
        names = json.loads(config.read_text("utf-8")).get("architectures") or [""]
    except (ValueError, AttributeError) as error:
        raise invalid_model(f"model '{model}': {config.name} does not tell an architecture: {error}") from error
    name = str(names[0])
    task = next((task for end, task in _TASKS.items() if name.endswith(end)), "")
    if not task and name.endswith(_ENCODER) and not name.endswith(_NO_ENCODERS) and _reads_text(config.parent):
        task = "feature-extraction"
    if not task:
        raise invalid_model(
            f"model '{model}': nothing says what an architecture '{name}' of {config.name} is asked; name it by "
            f"the variable {TASK}, such as {TASK}=text-classification, or for this model alone by such a parameter in "
            "a config.pbtxt beside it"
        )
    return task


def _reads_text(directory: Path) -> bool:
    there = {path.name for path in directory.iterdir()}
    return not there.isdisjoint(_OF_TEXT) and there.isdisjoint(_OF_OTHERS)


_TORCHSCRIPT = "model.pt"
_TORCH_SUFFIXES = {".pt", ".pth"}


class Defaults:
    """The default functions of one model. A client that likes all types alike gets `default_accept`."""

    def __init__(self, model: str, script: Path, device: Device, default_accept: str, context: Context) -> None:
        self._model = model
        self._script = script
        self._on = device
        self._context = context
        self._device = "cpu" if device.kind == "cpu" else f"cuda:{device.index}"
        self._default_accept = default_accept

    def model_fn(self, model_dir: str) -> Any:
        """The directory's booster, pipeline or SavedModels, or its one TorchScript file, loaded."""
        directory = Path(model_dir)
        of_boosters = boosters_in(directory)
        if of_boosters:
            return xgboost.load(of_boosters)
        if not (directory / _TORCHSCRIPT).is_file() and is_saved_pipeline(directory):
            return load_pipeline(self._model, directory, self._context.parameters.get(TASK, ""), self._on)
        if not (directory / _TORCHSCRIPT).is_file() and saved_models_in(directory):
            default = self._context.parameters.get(DEFAULT, "")
            return tensorflow.SavedModels(self._model, directory, self._on, default)
        file = self._torchscript(directory)
        try:
            torch = importlib.import_module("torch")
        except ImportError:
            raise self._missing("model_fn", f"{file.name} would be loaded by torch, which is not installed") from None
        return torch.jit.load(str(file), map_location=self._device)

    def input_fn(self, model: Any, body: bytes | str, content_type: str, *, for_script: bool = False) -> Any:
        """What the body says, in the form that `predict_fn` and the model want.

        `for_script`: the script's own `predict_fn` gets it, which may want the `inputs` of images and sounds.
        """
        if xgboost.is_booster(model):
            return xgboost.matrix(body, content_type, model.num_features())
        if isinstance(model, tensorflow.SavedModels):
            return tensorflow.request(body, content_type)
        if is_pipeline(model) or (for_script and is_media(content_type)):
            return decoded(body, content_type)
        data = decode(body, content_type)
        text = media_type(content_type) in {JSON, JSON_LINES, CSV}
        torch = sys.modules.get("torch")
        if not isinstance(data, np.ndarray):
            return data
        if torch is not None and isinstance(model, torch.nn.Module):
            tensor = torch.from_numpy(_floats(data) if text else data)
            return tensor.to(self._device)
        return _floats(data) if text and _is_scikit(model) else data

    def predict_fn(self, data: Any, model: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(model, torch.nn.Module):
            with torch.inference_mode():
                return model.to(self._device).eval()(data)
        if xgboost.is_booster(model):
            predicted = xgboost.predict(model, data)
            chosen = self._context.parameters.get(SELECTED)
            return (
                predicted if chosen is None else Selection(predicted, chosen.split(","), *xgboost.objective_of(model))
            )
        if isinstance(model, tensorflow.SavedModels):
            return model.predict(data, tensorflow.tfs_attributes(self._context))
        if isinstance(data, dict) and "inputs" in data and callable(model):
            return model(data["inputs"], **(data.get("parameters") or {}))
        if callable(getattr(model, "predict", None)):
            return _asked(model, data) if _is_scikit(model) else model.predict(data)
        return model(data)

    def check(self, model: Any) -> None:
        """Whether the default `predict_fn` knows how to ask what `model_fn` returned. Raises INVALID_MODEL."""
        if not callable(model) and not callable(getattr(model, "predict", None)):
            what = f"model_fn returned a {type(model).__name__}, which neither has predict nor can be called"
            raise self._missing("predict_fn", what)

    def output_fn(self, prediction: Any, accept: str) -> tuple[str | memoryview, str]:
        content_type = preferred(accept, WRITES, media_type(self._default_accept))
        if content_type is None:
            raise not_acceptable(self._model, "output_fn", f"Accept '{accept}' is not supported by this framework.")
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(prediction, torch.Tensor):
            prediction = prediction.detach().cpu().numpy()
        return encoded(prediction, content_type, literal=self._context.literal), content_type

    def _torchscript(self, model_dir: Path) -> Path:
        if (model_dir / _TORCHSCRIPT).is_file():
            return model_dir / _TORCHSCRIPT
        files = sorted(path for path in model_dir.iterdir() if path.suffix in _TORCH_SUFFIXES and path.is_file())
        if len(files) == 1:
            return files[0]
        found = ", ".join(file.name for file in files) or "no .pt or .pth file"
        raise self._missing(
            "model_fn", f"without one, {_TORCHSCRIPT} or the only TorchScript file is loaded: found {found}"
        )

    def _missing(self, function: str, reason: str) -> MmeError:
        return invalid_model(
            f"model '{self._model}': Please provide a {function} implementation in {self._script}: {reason}"
        )


def _floats(data: Array) -> Array:
    try:
        return floats(data)
    except (ValueError, TypeError, OverflowError) as error:
        raise MalformedBodyError(
            f"the body is not rows of as many numbers, without a header, as the default input_fn reads them: {error}; "
            "implement input_fn for others"
        ) from error


def _is_scikit(model: Any) -> bool:
    base = sys.modules.get("sklearn.base")
    return base is not None and isinstance(model, base.BaseEstimator)


def _asked(model: Any, data: Any) -> Any:
    # One row of JSON is a batch of one to an estimator, which it refuses as it comes.
    if isinstance(data, np.ndarray) and data.ndim < 2:
        data = data.reshape(1, -1)
    check_features(data, features_of(model))
    try:
        return model.predict(data)
    except ValueError as error:
        gap = _gap(data) if "NaN" in str(error) else ""
        if not gap:
            raise
        raise MalformedBodyError(f"{gap} of the body is empty, and the model takes no gaps: {error}") from error


def _gap(data: Any) -> str:
    if not isinstance(data, np.ndarray) or data.dtype.kind != "f":
        return ""
    gaps = np.argwhere(np.isnan(data))
    return place(gaps[0].tolist()) if len(gaps) else ""
