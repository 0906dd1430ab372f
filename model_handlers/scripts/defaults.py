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
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from model_handlers.errors import invalid_model
from model_handlers.scripts import boosters, pipelines, saved_models
from model_handlers.scripts.accept import preferred
from model_handlers.scripts.failures import not_acceptable
from model_handlers.scripts.formats import (
    CSV,
    JSON,
    JSON_LINES,
    WRITES,
    MalformedBodyError,
    check_features,
    decode,
    features_of,
    floats,
    media_type,
    place,
)
from model_handlers.scripts.no_script import (
    DEFAULT,
    SELECTED,
    TASK,
    boosters_in,
    is_saved_pipeline,
    saved_models_in,
)
from model_handlers.scripts.selection import Selection

if TYPE_CHECKING:
    from model_handlers.base import Device
    from model_handlers.errors import MmeError
    from model_handlers.scripts.context import Context
    from model_handlers.tensor import Array

_TORCHSCRIPT = "model.pt"
_TORCH_SUFFIXES = {".pt", ".pth"}


class Defaults:
    """The default functions of one model.

    Args:
        model: its name, for messages.
        script: the file that leaves them out, for messages.
        device: where a model of torch computes.
        default_accept: the type of an answer to a client that likes all alike.
        context: tells what a model of Hugging Face is for, and of the request.
    """

    def __init__(self, model: str, script: Path, device: Device, default_accept: str, context: Context) -> None:
        self._model = model
        self._script = script
        self._on = device
        self._context = context
        self._device = "cpu" if device.kind == "cpu" else f"cuda:{device.index}"
        self._default_accept = default_accept

    def model_fn(self, model_dir: str) -> Any:
        """The directory's booster, pipeline or SavedModels, or its one TorchScript file, loaded.

        Raises:
            MmeError: INVALID_MODEL when there is none of these, more than one file, or no such library.
        """
        directory = Path(model_dir)
        of_boosters = boosters_in(directory)
        if of_boosters:
            return boosters.load(of_boosters)
        if not (directory / _TORCHSCRIPT).is_file() and is_saved_pipeline(directory):
            return pipelines.load(self._model, directory, self._context.parameters.get(TASK, ""), self._on)
        if not (directory / _TORCHSCRIPT).is_file() and saved_models_in(directory):
            default = self._context.parameters.get(DEFAULT, "")
            return saved_models.SavedModels(self._model, directory, self._on, default)
        file = self._torchscript(directory)
        try:
            torch = importlib.import_module("torch")
        except ImportError:
            raise self._missing("model_fn", f"{file.name} would be loaded by torch, which is not installed") from None
        return torch.jit.load(str(file), map_location=self._device)

    def input_fn(self, model: Any, body: bytes | str, content_type: str, *, for_script: bool = False) -> Any:
        """What the body says, in the form that `predict_fn` and the model want.

        Args:
            model: what `model_fn` returned.
            body: the client's.
            content_type: what it is.
            for_script: whether the script's own `predict_fn` gets it, which may want the `inputs` of images and sounds.
        """
        if boosters.is_booster(model):
            return boosters.matrix(body, content_type, model.num_features())
        if isinstance(model, saved_models.SavedModels):
            return saved_models.request(body, content_type)
        if pipelines.is_pipeline(model) or (for_script and pipelines.is_media(content_type)):
            return pipelines.decoded(body, content_type)
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
        """What the model makes of it."""
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(model, torch.nn.Module):
            with torch.inference_mode():
                return model.to(self._device).eval()(data)
        if boosters.is_booster(model):
            predicted = boosters.predict(model, data)
            chosen = self._context.parameters.get(SELECTED)
            return (
                predicted if chosen is None else Selection(predicted, chosen.split(","), *boosters.objective_of(model))
            )
        if isinstance(model, saved_models.SavedModels):
            return model.predict(data, saved_models.said_by(self._context))
        if isinstance(data, dict) and "inputs" in data and callable(model):
            return model(data["inputs"], **(data.get("parameters") or {}))
        if callable(getattr(model, "predict", None)):
            return _asked(model, data) if _is_scikit(model) else model.predict(data)
        return model(data)

    def check(self, model: Any) -> None:
        """Whether the default `predict_fn` knows how to ask what `model_fn` returned.

        Raises:
            MmeError: INVALID_MODEL.
        """
        if not callable(model) and not callable(getattr(model, "predict", None)):
            what = f"model_fn returned a {type(model).__name__}, which neither has predict nor can be called"
            raise self._missing("predict_fn", what)

    def output_fn(self, prediction: Any, accept: str) -> tuple[str | memoryview, str]:
        """The body of the answer, and its content type.

        Raises:
            MmeError: NOT_ACCEPTABLE.
        """
        content_type = preferred(accept, WRITES, media_type(self._default_accept))
        if content_type is None:
            raise not_acceptable(self._model, "output_fn", f"Accept '{accept}' is not supported by this framework.")
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(prediction, torch.Tensor):
            prediction = prediction.detach().cpu().numpy()
        return pipelines.encoded(prediction, content_type, literal=self._context.literal), content_type

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
    """What an estimator predicts for rows. One row of JSON is a batch of one to it, which it refuses as it comes."""
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
    """Where the first NaN of an array lies, "" for none."""
    if not isinstance(data, np.ndarray) or data.dtype.kind != "f":
        return ""
    gaps = np.argwhere(np.isnan(data))
    return place(gaps[0].tolist()) if len(gaps) else ""
