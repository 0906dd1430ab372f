"""Models as Hugging Face's libraries save them: the pipeline of their task, and bodies and answers of it.

The library is imported when such a model is loaded, by the process that it is in. PURE, but for that and for reading
the model's config.json.
"""

from __future__ import annotations

import importlib
import io
import json
from typing import TYPE_CHECKING, Any

from model_handlers.errors import invalid_model
from model_handlers.scripts.csv_text import cells_of, written
from model_handlers.scripts.formats import (
    CSV,
    JSON,
    JSON_LINES,
    MalformedBodyError,
    UnsupportedFormatError,
    decode,
    encode,
    json_lines,
    media_type,
)
from model_handlers.scripts.no_script import CONFIG_FILE, TASK

if TYPE_CHECKING:
    from pathlib import Path

    from model_handlers.base import Device

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


def load(model: str, model_dir: Path, task: str, device: Device) -> Any:
    """The pipeline of the model in a directory.

    Args:
        model: its name, for messages.
        model_dir: where it was saved, with its tokenizer or processor.
        task: what it is for, "" for what its architecture is made for.
        device: where it computes.

    Raises:
        MmeError: INVALID_MODEL when nobody says what it is for, or the library is not installed.
    """
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
    """Whether a model is one of the library's pipelines."""
    return any(each.__module__.partition(".")[0] == "transformers" for each in type(model).__mro__)


def is_media(content_type: object) -> bool:
    """Whether a body of that type is a sound or an image, which Hugging Face's container alone reads."""
    return media_type(content_type).startswith(_MEDIA)


def decoded(body: bytes | str, content_type: object = JSON) -> Any:
    """What a pipeline is asked with: of JSON or its lines, of CSV with a header, an image, a sound; else as any other.

    Raises:
        UnsupportedFormatError: no such content type is read.
        MalformedBodyError: it can't be read as that.
    """
    kind = media_type(content_type)
    if kind == JSON:
        return _document(body)
    if kind == JSON_LINES:
        return _lines(body)
    if kind == CSV:
        return {"inputs": _rows(body)}
    if kind.startswith("audio/"):
        return {"inputs": bytes(body) if not isinstance(body, str) else body.encode()}
    if kind.startswith("image/"):
        return {"inputs": _image(body)}
    return decode(body, content_type)


def encoded(prediction: Any, content_type: object = JSON, *, literal: bool = False) -> str | memoryview:
    """A prediction as the body of an answer; in CSV a list of dictionaries is rows below a header. See `encode`.

    Raises:
        UnsupportedFormatError: no such content type is written.
        TypeError, ValueError: the prediction can't be written as that.
    """
    if media_type(content_type) != CSV or not is_rows(prediction):
        return encode(prediction, content_type, literal=literal)
    header = list(prediction[0])
    if any(not row.keys() <= prediction[0].keys() for row in prediction):
        raise ValueError(f"a row has other fields than {', '.join(map(str, header))}")
    return written([header, *([row.get(name) for name in header] for row in prediction)])


def is_rows(prediction: Any) -> bool:
    """Whether a prediction is what can be rows below a header."""
    return isinstance(prediction, list) and bool(prediction) and all(isinstance(row, dict) for row in prediction)


def _document(body: bytes | str) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedBodyError(f"the body is not {JSON}: {error}") from error


def _lines(body: bytes | str) -> Any:
    """Lines of inputs, or of objects of them, as one question: a pipeline takes one set of parameters."""
    try:
        lines = json_lines(body)
    except (ValueError, RecursionError) as error:
        raise MalformedBodyError(f"the body is not {JSON_LINES}: {error}") from error
    objects = [line if isinstance(line, dict) and "inputs" in line else {"inputs": line} for line in lines]
    if any(each.get("parameters") != objects[0].get("parameters") for each in objects):
        raise MalformedBodyError("the lines of the body have to have the same parameters")
    return {**objects[0], "inputs": [each["inputs"] for each in objects]}


def _rows(body: bytes | str) -> list[Any]:
    try:
        names, *cells = cells_of(body)
    except ValueError as error:
        raise MalformedBodyError(f"the body is not {CSV}: {error}") from error
    if not cells or not any(name in _HEADERS for name in names):
        raise MalformedBodyError(f"the body is not {CSV} with a header of {', '.join(_HEADERS)}")
    rows = [dict(zip(names, row, strict=True)) for row in cells]
    return [row["inputs"] for row in rows] if "inputs" in names else rows


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
    """Whether what was saved there has a tokenizer, and nothing but text to read."""
    there = {path.name for path in directory.iterdir()}
    return not there.isdisjoint(_OF_TEXT) and there.isdisjoint(_OF_OTHERS)
