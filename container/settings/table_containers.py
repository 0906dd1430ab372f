"""Variables that Amazon's own containers read: which are done here too, which change nothing, which refuse to start.

Those of SageMaker's toolkits that are honoured as a whole have rows in `table_sagemaker`; here is the rest of what the
containers of XGBoost, scikit-learn, PyTorch, TensorFlow and Hugging Face read. Model servers also take settings by
prefix (`MMS_…`, `TS_…`); those that have no row are logged by `reading`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from container.settings import values as v
from container.settings.kinds import Refused, Variable
from model_handlers.scripts.default_script import SELECTABLE

if TYPE_CHECKING:
    from container.settings.kinds import Parser

_TIMEOUT = v.seconds(0.1, 3600)
_WORKERS = v.integer(1, 64)
_BATCHING = "a request to a script, or to a SavedModel without one, is computed by itself."
_THREADS = "each model says in its config.pbtxt how many threads it has."
_JAVA = "there is no Java machine here."
_FRONT = "there is no nginx or gunicorn in front of models here."
_HUB = "nothing is downloaded from Hugging Face: put the model's files into its archive."
_AUTOPILOT = "it tells Autopilot's own tools what a container takes or could answer, and no container."


def _selected(text: str) -> tuple[str, ...]:
    """Keys of selectable inference, in the order of an answer in CSV."""
    keys = tuple(text.replace(" ", "").lower().split(","))
    if len(set(keys)) != len(keys) or not set(keys) <= set(SELECTABLE):
        raise ValueError(f"one or several of {', '.join(SELECTABLE)}, each once")
    return keys


def _folder(there: str, instead: str) -> Parser:
    """A parser of a place that the containers look for models in, for which there is another variable here."""

    def parse(text: str) -> str:
        if text.rstrip("/") == there:
            return text
        if text == "\0":
            raise ValueError(there)
        raise Refused(f"models are looked for elsewhere: name their place by {instead}")

    return parse


def _handler(text: str) -> str:
    """A service of MMS, of which the containers' own is what is done here."""
    if text == "\0":
        raise ValueError("a handler service of Amazon's containers")
    if not text.startswith("sagemaker_"):
        raise Refused(
            "handler services of MMS and TorchServe are not run: put what this one does into code/inference.py"
        )
    return text


def _universal(text: str) -> str:
    """The place of a script for all models, as files: refused, since it is an archive here."""
    if text == "\0":
        raise ValueError("unset")
    raise Refused("pack the scripts for all models, and name their archive by SAGEMAKER_SUBMIT_DIRECTORY")


def _without(name: str, why: str) -> Variable:
    """One that changes nothing here, whatever it says."""
    return Variable(name, "", str, f"no effect: {why}")


def _timeout(name: str, whose: str) -> Variable:
    return Variable(name, "request_timeout", _TIMEOUT, f"Seconds for one request, as MME_REQUEST_TIMEOUT: {whose}.")


def _workers(name: str, whose: str) -> Variable:
    return Variable(
        name, "script_workers", _WORKERS, f"Processes of a script, as SAGEMAKER_MODEL_SERVER_WORKERS: {whose}."
    )


def _body(name: str, whose: str) -> Variable:
    return Variable(name, "max_body_bytes", v.body_size, f"Largest body, as MME_MAX_BODY: {whose}.")


CONTAINER_VARIABLES = (
    Variable(
        "SAGEMAKER_INFERENCE_OUTPUT",
        "script_output",
        _selected,
        "What XGBoost answers for each row, comma-separated: its selectable inference, which Autopilot sets. A key "
        "that the model's objective has nothing for is null, in CSV nan.",
        default="its prediction",
    ),
    _without("SAGEMAKER_INFERENCE_INPUT", _AUTOPILOT),
    _without("SAGEMAKER_INFERENCE_SUPPORTED", _AUTOPILOT),
    _body("MAX_CONTENT_LENGTH", "XGBoost's"),
    _body("SAGEMAKER_MAX_REQUEST_SIZE", "XGBoost's and scikit-learn's"),
    _workers("SAGEMAKER_NUM_MODEL_WORKERS", "XGBoost's and scikit-learn's"),
    _without("SAGEMAKER_MODEL_JOB_QUEUE_SIZE", "requests wait as long as MME_REQUEST_TIMEOUT says."),
    _without("SAGEMAKER_MAX_HEAP_SIZE", _JAVA),
    _without("SAGEMAKER_MAX_DIRECT_MEMORY_SIZE", _JAVA),
    _without("SAGEMAKER_DISABLE_CONTAINER_SUPPORT", _JAVA),
    _without("SAGEMAKER_USE_NGINX", _FRONT),
    _without("SAGEMAKER_REGION", "boto3 reads AWS_REGION."),
    _without("CA_REPOSITORY_ARN", "packages of a requirements.txt come from the index that pip is told of."),
    Variable("SAGEMAKER_HANDLER", "", _handler, "no effect: what Amazon's own service does is done for every script."),
    Variable("SAGEMAKER_BASE_DIR", "", _folder("/opt/ml", "MME_MODEL_DIR"), "no effect: /opt/ml is the default."),
    Variable(
        "SAGEMAKER_MODEL_PATH",
        "",
        _folder("/opt/ml/model", "MME_MODEL_DIR"),
        "no effect: /opt/ml/model is the default.",
    ),
    Variable("SM_MODEL_DIR", "", _folder("/opt/ml/model", "MME_MODEL_DIR"), "no effect: /opt/ml/model is the default."),
    _timeout("SAGEMAKER_TS_RESPONSE_TIMEOUT", "PyTorch's"),
    _workers("SAGEMAKER_TS_MIN_WORKERS", "PyTorch's"),
    _without("SAGEMAKER_TS_MAX_WORKERS", "a script has as many processes as it begins with."),
    _without("SAGEMAKER_TS_BATCH_SIZE", _BATCHING),
    _without("SAGEMAKER_TS_MAX_BATCH_DELAY", _BATCHING),
    _timeout("TS_DEFAULT_RESPONSE_TIMEOUT", "TorchServe's"),
    _workers("TS_DEFAULT_WORKERS_PER_MODEL", "TorchServe's"),
    _body("TS_MAX_REQUEST_SIZE", "TorchServe's"),
    _timeout("MMS_DEFAULT_RESPONSE_TIMEOUT", "that of MMS"),
    _workers("MMS_DEFAULT_WORKERS_PER_MODEL", "those of MMS"),
    _body("MMS_MAX_REQUEST_SIZE", "that of MMS"),
    _without("SAGEMAKER_TFS_ENABLE_BATCHING", _BATCHING),
    _without("SAGEMAKER_TFS_MAX_BATCH_SIZE", _BATCHING),
    _without("SAGEMAKER_TFS_BATCH_TIMEOUT_MICROS", _BATCHING),
    _without("SAGEMAKER_TFS_NUM_BATCH_THREADS", _BATCHING),
    _without("SAGEMAKER_TFS_MAX_ENQUEUED_BATCHES", _BATCHING),
    _without("SAGEMAKER_TFS_INSTANCE_COUNT", "SAGEMAKER_MODEL_SERVER_WORKERS says how many processes a model has."),
    _without("SAGEMAKER_TFS_INTER_OP_PARALLELISM", _THREADS),
    _without("SAGEMAKER_TFS_INTRA_OP_PARALLELISM", _THREADS),
    _without("SAGEMAKER_TFS_FRACTIONAL_GPU_MEM_MARGIN", "MME_GPU_MEMORY_BUDGET bounds memory of GPUs."),
    _without("SAGEMAKER_TFS_WAIT_TIME_SECONDS", "each load has MME_LOAD_TIMEOUT."),
    _without("SAGEMAKER_TFS_VERSION", "the installed TensorFlow serves models of any version."),
    _without("SAGEMAKER_TFS_NGINX_LOGLEVEL", _FRONT),
    _timeout("SAGEMAKER_NGINX_PROXY_READ_TIMEOUT_SECONDS", "TensorFlow's"),
    _timeout("SAGEMAKER_GUNICORN_TIMEOUT_SECONDS", "TensorFlow's"),
    _without("SAGEMAKER_GUNICORN_WORKERS", "SAGEMAKER_MODEL_SERVER_WORKERS says how many processes a script has."),
    _without("SAGEMAKER_GUNICORN_THREADS", "a script's process answers one request at a time."),
    _without("SAGEMAKER_GUNICORN_WORKER_CLASS", _FRONT),
    _without("SAGEMAKER_GUNICORN_LOGLEVEL", _FRONT),
    Variable(
        "SAGEMAKER_MULTI_MODEL_UNIVERSAL_BUCKET",
        "",
        _universal,
        "Refused: name the archive of the script for all models by SAGEMAKER_SUBMIT_DIRECTORY.",
    ),
    Variable(
        "SAGEMAKER_MULTI_MODEL_UNIVERSAL_PREFIX",
        "",
        _universal,
        "Refused: see SAGEMAKER_MULTI_MODEL_UNIVERSAL_BUCKET.",
    ),
    _without("HF_MODEL_ID", _HUB),
    _without("HF_MODEL_REVISION", _HUB),
    _without("HF_API_TOKEN", _HUB),
    _without("HF_TRUST_REMOTE_CODE", "a pipeline runs the code of the installed transformers alone."),
    _without("HF_OPTIMUM_BATCH_SIZE", "models are not compiled for Neuron."),
    _without("HF_OPTIMUM_SEQUENCE_LENGTH", "models are not compiled for Neuron."),
)
