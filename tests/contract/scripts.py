"""Inference scripts that tests serve, as people write them for SageMaker's own containers, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# Nothing but model_fn: all else is default.
CLASSIFIER = """
import os
import joblib

def model_fn(model_dir):
    print("loading from", model_dir)
    return joblib.load(os.path.join(model_dir, "model.joblib"))
"""

# Of TensorFlow's container.
HANDLERS = """
import json

def input_handler(data, context):
    assert context.request_content_type == "text/csv"
    return json.dumps({"instances": [float(word) for word in data.read().decode().split(",")]})

def output_handler(response, context):
    return json.dumps({**response.json(), "by": "script"}), context.accept_header
"""

# Tells with what its process began.
BEGINS = """
import os, sys
THERE = "sklearn" in sys.modules
# before
import numpy as np
import joblib

def model_fn(model_dir):
    return {"there": THERE, "draws": np.random.rand()}

def predict_fn(data, model):
    return model
"""

# Tells what it was given, and does as the body says.
TELLS = """
import json, logging, os, sys
import numpy as np
from helper import NUMBER
from sagemaker_inference.errors import GenericInferenceToolkitError

logger = logging.getLogger(__name__)

def model_fn(model_dir, context):
    return {"pid": os.getpid(), "files": sorted(os.listdir(model_dir)), "gpu": context.system_properties["gpu_id"]}

def transform_fn(model, request_body, content_type, accept, context):
    if request_body == "fail":
        raise ValueError("the body says so")
    if isinstance(request_body, str) and request_body.startswith("status "):
        raise GenericInferenceToolkitError(int(request_body[7:]), "the script says so")
    if request_body == "memory":
        raise MemoryError("none left")
    if request_body == "exit":
        sys.exit(3)
    if request_body == "die":
        os.kill(os.getpid(), 9)
    if content_type == "image/x-echo":
        return request_body, "image/x-echoed"
    logger.info("asked with %s", content_type)
    told = {
        "number": NUMBER,
        "model": model,
        "body": [type(request_body).__name__, len(request_body)],
        "content_type": content_type,
        "accept": accept,
        "attributes": context.get_request_header(0, "X-Amzn-SageMaker-Custom-Attributes"),
    }
    return json.dumps(told), "application/json"
"""

CUSTOM = """
import json
import numpy as np
from sagemaker_inference import content_types, decoder, encoder

def model_fn(model_dir):
    return 2.0

def input_fn(body, content_type):
    if content_type == "application/x-floats":
        return np.frombuffer(body, "<f4")
    return decoder.decode(body, content_type)

def predict_fn(data, model):
    return data * model

def output_fn(prediction, accept):
    if accept == "application/x-floats":
        return prediction.astype("<f4").tobytes(), accept
    return encoder.encode(prediction, accept)
"""


# Writes as many pieces as it is told to.
STREAMS = """
import json, os, time

def model_fn(model_dir):
    return 1

def transform_fn(model, body, content_type, accept, context):
    context.set_response_content_type(0, "text/x-pieces")
    said = json.loads(body)
    try:
        for number in range(said["pieces"]):
            if number == said.get("wait_at"):
                while not os.path.exists(said["file"]):
                    time.sleep(0.01)
            if number == said.get("fail_at"):
                raise ValueError("in the middle")
            time.sleep(said.get("pause", 0))
            yield f"piece {number};"
    finally:
        if "left" in said:
            open(said["left"], "w").close()
"""


def lay_out(folder: Path, script: str, place: str = "code/inference.py", **files: bytes | str) -> Path:
    """Write a model with its script."""
    for path, content in {place: script, **files}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder
