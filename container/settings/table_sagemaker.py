"""SageMaker's and Triton's variables: which we honour, which change nothing, which refuse to start.

Rows of the table in `table`. Those without a field either take part in a rule of `sagemaker` or are
accepted without an effect; then `help` begins with "no effect:" and the server logs it once.

The log level follows Triton's four switches: it is that of the least severe of VERBOSE, INFO, WARNING and ERROR that is
on. VERBOSE is off unless set; Triton's own default is on, and floods CloudWatch.
"""

from __future__ import annotations

import re

from container.control.routes import InferenceType
from container.settings import values as v
from container.settings.kinds import PingMode, Refused, Variable

_MOST_DIGITS = 9
_PORT = v.integer(0, 65535)
_THREADS = v.integer(1, 1024)
_TIMEOUT = v.seconds(0.1, 3600)


def _inference_type(text: str) -> InferenceType:
    """One of Triton's three; a wrong one is refused in its words."""
    allowed = ", ".join(inference_type.value for inference_type in InferenceType)
    try:
        return InferenceType(text)
    except ValueError:
        if text == "\0":
            raise ValueError(allowed) from None
        raise Refused(f"ERROR: Invalid SAGEMAKER_TRITON_INFERENCE_TYPE '{text}'. Allowed: {allowed}") from None


def _any(text: str) -> str:
    """Text that nothing here looks into."""
    return text


def _log_flag(text: str) -> bool:
    """A boolean, or a verbosity of which anything above 0 is on."""
    if not re.fullmatch(r"[0-9]+", text):
        return bool(v.boolean(text))
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"true, false or a verbosity of at most {_MOST_DIGITS} digits")
    return int(text) > 0


SAGEMAKER_VARIABLES = (
    Variable(
        "SAGEMAKER_MULTI_MODEL",
        "",
        v.boolean,
        "true: SageMaker loads and unloads models through /models.",
        default="false",
    ),
    Variable(
        "SAGEMAKER_BIND_TO_PORT",
        "",
        v.integer(1, 65535),
        "Port to listen on; wins over MME_PORT, because SageMaker calls no other.",
        default="unset",
    ),
    Variable(
        "SAGEMAKER_SAFE_PORT_RANGE",
        "",
        v.port_range,
        "Ports that a container may choose for itself. Checked for every port but 8080 and SAGEMAKER_BIND_TO_PORT, "
        "which SageMaker chose.",
        default="unset",
    ),
    Variable("SAGEMAKER_BATCH", "batch_transform", v.boolean, "Set by a batch transform job."),
    Variable(
        "SAGEMAKER_MAX_PAYLOAD_IN_MB",
        "max_payload_in_mb",
        v.integer(0, v.MOST_PAYLOAD_MB),
        "Largest body of a batch transform (0: no limit of the job's); raises MME_MAX_BODY where larger.",
    ),
    Variable(
        "SAGEMAKER_BATCH_STRATEGY",
        "batch_strategy",
        v.choice("SINGLE_RECORD", "MULTI_RECORD"),
        "Told to SageMaker by /execution-parameters.",
    ),
    Variable(
        "SAGEMAKER_MAX_CONCURRENT_TRANSFORMS",
        "max_concurrent_transforms",
        v.integer(1, 1000),
        "Told to SageMaker by /execution-parameters.",
    ),
    Variable(
        "SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT",
        "default_accept",
        v.media_type,
        "Content type of answers to requests without an Accept header; for tensors JSON or Triton's binary form.",
    ),
    Variable("SAGEMAKER_CONTAINER_LOG_LEVEL", "log_level", v.log_level, "Log level, by name or number."),
    Variable(
        "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS", "request_timeout", _TIMEOUT, "Seconds for one inference request."
    ),
    Variable("SAGEMAKER_MODEL_SERVER_TIMEOUT", "request_timeout", _TIMEOUT, "Seconds for one inference request."),
    Variable(
        "SAGEMAKER_MODEL_SERVER_WORKERS",
        "script_workers",
        v.integer(1, 64),
        "Processes of each inference script; models with a config.pbtxt say it there.",
    ),
    Variable("SAGEMAKER_MODEL_SERVER_VMARGS", "", _any, "no effect: there is no Java machine here."),
    Variable(
        "SAGEMAKER_STARTUP_TIMEOUT",
        "",
        v.integer(0, 86_400),
        "no effect: the server answers at once, and each load has MME_LOAD_TIMEOUT.",
    ),
    Variable(
        "SAGEMAKER_PROGRAM",
        "script_program",
        v.script_name,
        "File name of inference scripts, in `code/` of an archive or at its root.",
    ),
    Variable(
        "SAGEMAKER_SUBMIT_DIRECTORY",
        "script_directory",
        v.submit_directory,
        "The inference script of models that bring none: a folder, or an archive of it, here or in S3; "
        "/opt/ml/model/code means each model's own.",
        default="none",
    ),
    Variable(
        "HF_TASK",
        "script_task",
        v.task,
        "What a model of Hugging Face's libraries is asked that brings no inference script.",
        default="what its architecture is made for",
    ),
    Variable(
        "SAGEMAKER_TFS_DEFAULT_MODEL_NAME",
        "script_saved_model",
        v.model_name,
        "Of several of TensorFlow's SavedModels in one archive the one that is asked where a client names none.",
        default="the first by name",
    ),
    Variable(
        "SAGEMAKER_ENABLE_STATEFUL_SESSIONS",
        "sessions",
        v.boolean,
        "Whether clients may have stateful sessions (SessionId in boto3).",
    ),
    Variable(
        "SAGEMAKER_SESSIONS_EXPIRATION",
        "session_seconds",
        v.seconds(0.1, 604_800),
        "As MME_SESSION_SECONDS.",
    ),
    Variable(
        "SAGEMAKER_SESSIONS_PATH",
        "",
        _any,
        "no effect: sessions live in memory, with what their models know of them.",
    ),
)

TRITON_VARIABLES = (
    Variable(
        "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME",
        "default_model_name",
        v.model_name,
        "The model that /invocations asks where no header names a target model.",
        default="the only directory in the model directory; of many models none",
    ),
    Variable(
        "SAGEMAKER_TRITON_INFERENCE_TYPE",
        "inference_type",
        _inference_type,
        "What bodies of /invocations mean: tensors (infer), or Triton's flat JSON with one answer or several.",
        default="infer",
    ),
    Variable(
        "SAGEMAKER_TRITON_OVERRIDE_PING_MODE",
        "ping_mode",
        v.enum_of(PingMode),
        "As MME_PING_MODE; wins over SAGEMAKER_TRITON_PING_MODE.",
    ),
    Variable("SAGEMAKER_TRITON_PING_MODE", "ping_mode", v.enum_of(PingMode), "As MME_PING_MODE."),
    Variable(
        "SAGEMAKER_TRITON_MODEL_LOAD_GPU_LIMIT",
        "gpu_memory_budget",
        v.fraction,
        "Share of each GPU's memory for models, as MME_GPU_MEMORY_BUDGET.",
    ),
    Variable("SAGEMAKER_TRITON_LOG_VERBOSE", "", _log_flag, "true or above 0: level debug.", default="false"),
    Variable("SAGEMAKER_TRITON_LOG_INFO", "", _log_flag, "false: level warning.", default="true"),
    Variable("SAGEMAKER_TRITON_LOG_WARNING", "", _log_flag, "false, and INFO too: level error.", default="true"),
    Variable("SAGEMAKER_TRITON_LOG_ERROR", "", _log_flag, "false, and the others too: level critical.", default="true"),
    Variable(
        "SAGEMAKER_TRITON_ADDITIONAL_ARGS",
        "",
        _any,
        "Flags of tritonserver; the few that mean something here are translated, any other is refused.",
    ),
    Variable(
        "SAGEMAKER_TRITON_ALLOW_GRPC",
        "",
        v.boolean,
        "true: KServe v2 over gRPC as well, as MME_GRPC_PORT.",
        default="false",
    ),
    Variable(
        "SAGEMAKER_TRITON_GRPC_PORT",
        "",
        _PORT,
        "Port of gRPC with SAGEMAKER_TRITON_ALLOW_GRPC=true; must lie in SAGEMAKER_SAFE_PORT_RANGE.",
        default="8001",
    ),
    Variable(
        "SAGEMAKER_TRITON_ALLOW_METRICS",
        "",
        v.boolean,
        "true: /metrics at SAGEMAKER_TRITON_METRICS_PORT as well, if that is set; on the main port it is always there.",
        default="false",
    ),
    Variable(
        "SAGEMAKER_TRITON_METRICS_PORT",
        "",
        _PORT,
        "Port of metrics with SAGEMAKER_TRITON_ALLOW_METRICS=true; must lie in SAGEMAKER_SAFE_PORT_RANGE.",
        default="none",
    ),
    Variable("SAGEMAKER_TRITON_THREAD_COUNT", "", _THREADS, "no effect: one event loop answers every connection."),
    Variable(
        "SAGEMAKER_TRITON_BUFFER_MANAGER_THREAD_COUNT",
        "",
        v.integer(0, 1024),
        "no effect: tensors are gathered by the thread that executes the batch.",
    ),
    Variable(
        "SAGEMAKER_TRITON_SHM_DEFAULT_BYTE_SIZE",
        "shared_memory_bytes",
        v.integer(1, 2**40),
        "Bytes of the memory first shared with a model's process; it grows with what a batch needs.",
        default="65536",
    ),
    Variable(
        "SAGEMAKER_TRITON_SHM_GROWTH_BYTE_SIZE",
        "shared_memory_growth_bytes",
        v.integer(1, 2**40),
        "Bytes by which it grows at least; it doubles where that is more.",
        default="0",
    ),
    Variable(
        "SAGEMAKER_TRITON_TENSORFLOW_VERSION", "", v.integer(1, 2), "no effect: TensorFlow 2 serves models of either."
    ),
    Variable(
        "SAGEMAKER_TRITON_DISABLE_MODEL_NAMESPACING",
        "",
        v.boolean,
        "no effect: every archive is a namespace of its own.",
    ),
    Variable("TRITON_AWS_MOUNT_DIRECTORY", "cache_dir", v.directory, "What MME_CACHE_DIR is."),
    Variable(
        "TRITON_CLOUD_CREDENTIAL_PATH",
        "cloud_credentials",
        v.file,
        "JSON file with the credentials of model repositories in S3, by their prefixes, as Triton has it.",
        default="none, those that boto3 finds",
    ),
)
