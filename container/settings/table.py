"""Every variable that decides how the server runs, as data: its name, what it sets, what it may be, what it does.

The parser, `mme serve --help`, `mme settings` and the documentation all read this table, so none can name a variable
that the others do not know. Here are our own, with those of `table_protocol`; `table_sagemaker` holds SageMaker's and
Triton's, `azureml` Azure's one.
Where several variables set one field, the row that comes first wins: MME_ before SAGEMAKER_TRITON_ before SAGEMAKER_.
"""

from __future__ import annotations

from container.settings import values as v
from container.settings.azureml import AZUREML_VARIABLES
from container.settings.kinds import LogFormat, PingMode, RateLimit, Variable
from container.settings.table_protocol import PROTOCOL_VARIABLES
from container.settings.table_sagemaker import SAGEMAKER_VARIABLES, TRITON_VARIABLES
from serve.cache.eviction import Policy
from serve.control import Control
from serve.weights.mode import Weights

_PORT = v.integer(0, 65535)
_TIMEOUT = v.seconds(0.1, 3600)
_DIMENSION = v.printable(1024)

MME_VARIABLES = (
    Variable(
        "MME_MODEL_STORE",
        "model_store",
        v.model_store,
        "Serve archives: TargetModel names a .tar.gz under this S3 prefix or in this folder.",
        "--model-store",
        "none",
    ),
    Variable(
        "MME_MODEL_REPOSITORY",
        "model_repository",
        v.repositories,
        "Serve a Triton model repository, on disk or in S3, or several (comma-separated; the flag may be repeated). "
        "Without a control mode all its models are loaded at start.",
        "--model-repository",
        "none",
    ),
    Variable(
        "MME_MODEL_DIR",
        "model_dir",
        v.directory,
        "Serve one model, as SageMaker unpacks it: the folder that holds the model's directory.",
        "--model-dir",
        "/opt/ml/model",
    ),
    Variable(
        "MME_LOAD_MODEL",
        "load_models",
        v.names,
        "Models to load at start (comma-separated; the flag may be repeated). Of a repository: only these; * for all.",
        "--load-model",
        "none, of a repository all",
    ),
    Variable(
        "MME_MODEL_CONTROL_MODE",
        "model_control_mode",
        v.enum_of(Control),
        "Who decides which models of a repository are served. demand: all at start, any other by its first request or "
        "a load; none: all at start, for good; explicit: those named at start, and loads and unloads; poll: what the "
        "folder holds.",
        "--model-control-mode",
    ),
    Variable(
        "MME_REPOSITORY_POLL_SECS",
        "poll_seconds",
        v.seconds(0.1, 86_400),
        "Seconds between two looks at the repository in mode poll.",
        "--repository-poll-secs",
    ),
    Variable(
        "MME_MODEL_NAMESPACING",
        "model_namespacing",
        v.boolean,
        "Let several repositories have models of one name, which requests call FOLDER/NAME then.",
        "--model-namespacing",
    ),
    Variable(
        "MME_MODEL_CONFIG_NAME",
        "model_config_name",
        v.model_name,
        "Read configs/NAME.pbtxt of a model in place of its config.pbtxt, where it has one.",
        "--model-config-name",
        "none",
    ),
    Variable(
        "MME_DISABLE_AUTO_COMPLETE_CONFIG",
        "strict_config",
        v.boolean,
        "Refuse a model whose config.pbtxt leaves anything out, instead of completing it from the model file.",
        "--disable-auto-complete-config",
    ),
    Variable(
        "MME_DEFAULT_MAX_BATCH_SIZE",
        "default_batch_sizes",
        v.batch_sizes,
        "max_batch_size of models that batch and whose config.pbtxt leaves that out: of all, or of one backend's "
        "(comma-separated; the flag may be repeated).",
        "--default-max-batch-size",
        "4, for trees 32768",
    ),
    Variable("MME_HOST", "host", v.host, "Address to listen on.", "--host"),
    Variable("MME_PORT", "port", _PORT, "Port to listen on; 0 takes a free one and logs it.", "--port"),
    Variable(
        "MME_GRPC_PORT",
        "grpc_port",
        _PORT,
        "Port to serve KServe v2 over gRPC on, beside HTTP; 0 takes a free one and logs it.",
        "--grpc-port",
        "no gRPC",
    ),
    Variable(
        "MME_MEMORY_BUDGET",
        "memory_budget",
        v.memory_budget,
        "Memory that models on the host may take together.",
        "--memory-budget",
        "what the host leaves",
    ),
    Variable(
        "MME_GPU_MEMORY_BUDGET",
        "gpu_memory_budget",
        v.memory_budget,
        "Memory that models may take of each GPU.",
        "--gpu-memory-budget",
        "what the GPU leaves",
    ),
    Variable(
        "MME_EVICTION",
        "eviction",
        v.enum_of(Policy),
        "Who leaves memory first when it is full: the least recently used, the least frequently used, or by what "
        "bringing it back costs for its size and use (gdsf).",
        "--eviction",
    ),
    Variable(
        "MME_PIN",
        "pins",
        v.names,
        "Models that never leave memory for others, by name or pattern such as bert-* (comma-separated; the flag may "
        "be repeated).",
        "--pin",
        "none",
    ),
    Variable(
        "MME_MIN_RESIDENCY",
        "min_residency",
        v.seconds(0, 3600),
        "Seconds after its load for which a model stays in memory, whoever needs the room.",
        "--min-residency",
    ),
    Variable(
        "MME_REQUIRE_GPU",
        "require_gpu",
        v.boolean,
        "Refuse a model whose instance group is KIND_GPU where there is no GPU, instead of running it on the CPU.",
        "--require-gpu",
    ),
    Variable(
        "MME_WEIGHTS",
        "weights",
        v.enum_of(Weights),
        "How ONNX models on the CPU hold their weights: mapped from disk, once for all that share them; packed for the "
        "processor, quickest and largest; auto maps, and packs what is hot; plain keeps nothing on disk.",
        "--weights",
    ),
    Variable(
        "MME_RATE_LIMIT",
        "rate_limit",
        v.enum_of(RateLimit),
        "execution_count: instances wait for the resources that their rate_limiter names, and take turns by priority.",
        "--rate-limit",
    ),
    Variable(
        "MME_RATE_LIMIT_RESOURCE",
        "rate_limit_resources",
        v.resource_limits,
        "What there is of a resource: NAME:COUNT on every device, NAME:COUNT:DEVICE on one (comma-separated; the flag "
        "may be repeated).",
        "--rate-limit-resource",
        "as much as the neediest instance wants",
    ),
    Variable(
        "MME_RESPONSE_CACHE",
        "response_cache_bytes",
        v.response_cache,
        "Memory for responses to requests that come again, of models with response_cache { enable: true }; 0 for none.",
        "--response-cache",
        "64MiB",
    ),
    Variable(
        "MME_CACHE_DIR",
        "cache_dir",
        v.directory,
        "Where archives are unpacked, and environments of Python models and weights to be mapped are kept.",
        "--cache-dir",
        "$XDG_CACHE_HOME/mme, else a folder of the user's in the temporary directory",
    ),
    Variable(
        "MME_DISK_BUDGET",
        "disk_budget",
        v.memory_budget,
        "Disk space that unpacked archives may take together; a share is one of the file system.",
        "--disk-budget",
        "80% of what is free at the start and of what they take then",
    ),
    Variable("MME_LOAD_THREADS", "load_threads", v.integer(1, 64), "Models that may load at once.", "--load-threads"),
    Variable(
        "MME_LOAD_TIMEOUT",
        "load_timeout",
        v.seconds(1, 86_400),
        "Seconds for one load, download included; less than 360 where SageMaker loads, which gives up then.",
        "--load-timeout",
    ),
    Variable("MME_MAX_BODY", "max_body_bytes", v.byte_size, "Largest request body.", "--max-body", "64MiB"),
    Variable(
        "MME_ALLOW_CLIENT_SHM",
        "allow_client_shm",
        v.boolean,
        "Let clients of this machine register regions of shared memory, and name them in place of tensors.",
        "--allow-client-shm",
    ),
    Variable(
        "MME_REQUEST_TIMEOUT",
        "request_timeout",
        _TIMEOUT,
        "Seconds for one inference request; SageMaker gives up after 60. So long may a model's process execute a "
        "batch, if that is more than 60 and its parameter MME_EXECUTION_TIMEOUT says nothing, and the Runtime API "
        "waits for a load. In a batch transform job 3600 by default: the job says how long it waits.",
    ),
    Variable("MME_IDLE_TIMEOUT", "idle_timeout", _TIMEOUT, "Seconds a connection may lie idle between requests."),
    Variable("MME_HEADER_TIMEOUT", "header_timeout", _TIMEOUT, "Seconds for a client to send a request's headers."),
    Variable("MME_BODY_TIMEOUT", "body_timeout", _TIMEOUT, "Seconds for a client to send a request's body."),
    Variable(
        "MME_SESSION_SECONDS",
        "session_seconds",
        v.seconds(0.1, 604_800),
        "Seconds for which a stateful session of SageMaker's clients may lie unused.",
        "--session-seconds",
    ),
    Variable(
        "MME_DRAIN_SECONDS",
        "drain_seconds",
        v.seconds(0, 600),
        "Seconds after SIGTERM for accepted requests to finish; SageMaker kills after 30.",
    ),
    Variable(
        "MME_INLINE_MICROSECONDS",
        "inline_microseconds",
        v.integer(0, 1_000_000),
        "Models that take no longer than this run on the event loop when nothing waits; 0 never does.",
    ),
    Variable(
        "MME_BUSY_POLL_MICROSECONDS",
        "busy_poll_microseconds",
        v.integer(0, 10_000),
        "How long the loop and models' processes stay awake for what is likely to come at once; 0 never do.",
    ),
    Variable(
        "MME_PING_MODE",
        "ping_mode",
        v.enum_of(PingMode),
        "What a 200 from /ping means: the server lives, or the models of the start-up list are ready.",
        default="ready with one model, else live",
    ),
    Variable("MME_LOG_LEVEL", "log_level", v.log_level, "Least severe level that is logged.", "--log-level"),
    Variable(
        "MME_LOG_FORMAT",
        "log_format",
        v.enum_of(LogFormat),
        "Text for people, JSON lines for machines; auto chooses text on a terminal; default and ISO8601 are Triton's.",
        "--log-format",
    ),
    Variable(
        "MME_EMF",
        "emf",
        v.boolean,
        "Write CloudWatch metrics to standard output, in the embedded metric format.",
        default="true where SageMaker runs the container, else false",
    ),
    Variable("MME_EMF_NAMESPACE", "emf_namespace", v.namespace, "CloudWatch namespace of those metrics."),
    Variable("MME_EMF_PERIOD", "emf_period", v.seconds(1, 3600), "Seconds that one line of those metrics tells of."),
    Variable(
        "MME_EMF_TOP_MODELS",
        "emf_top_models",
        v.integer(0, 100),
        "Metrics for each of so many models too, the most requested ones; CloudWatch bills every model's.",
    ),
    Variable(
        "MME_ENDPOINT_NAME",
        "endpoint_name",
        _DIMENSION,
        "The endpoint's name in those metrics; SageMaker does not tell its containers.",
        default="unknown",
    ),
    Variable("MME_VARIANT_NAME", "variant_name", _DIMENSION, "The production variant's name in those metrics."),
    Variable(
        "MME_TRACE_URL",
        "trace_url",
        v.trace_url,
        "Send traces of requests there, by OpenTelemetry's protocol over HTTP.",
        "--trace-url",
        "none",
    ),
    Variable(
        "MME_TRACE_RATE",
        "trace_rate",
        v.integer(0, 1_000_000_000),
        "Trace one request of so many, of those whose client does not say whether it is traced; 0: none of those.",
        "--trace-rate",
    ),
    Variable(
        "MME_TRACE_LEVEL",
        "trace_level",
        v.trace_levels,
        "What is told of a request that is traced, OFF for nothing until Triton's trace extension asks for something; "
        "tensors are written to a file alone (the flag may be repeated).",
        "--trace-level",
    ),
    Variable(
        "MME_TRACE_COUNT",
        "trace_count",
        v.integer(-1, 1_000_000_000),
        "Trace so many requests, and then no more; -1: all.",
        "--trace-count",
    ),
    Variable(
        "MME_TRACE_FILE",
        "trace_file",
        v.file,
        "Write traces of requests there when the server ends, in Triton's own format.",
        "--trace-file",
        "none",
    ),
    Variable(
        "MME_TRACE_LOG_FREQUENCY",
        "trace_log_frequency",
        v.integer(0, 1_000_000),
        "Write so many traces at a time, to that file with .0, .1, … behind its name; 0 writes all at the end.",
        "--trace-log-frequency",
    ),
    Variable(
        "MME_DASHBOARD",
        "dashboard",
        v.boolean,
        "Serve a page of what happens at /dashboard, to whoever can reach the port; through SageMaker nobody can.",
    ),
    *PROTOCOL_VARIABLES,
)

VARIABLES = MME_VARIABLES + TRITON_VARIABLES + SAGEMAKER_VARIABLES + AZUREML_VARIABLES
BY_NAME = {variable.name: variable for variable in VARIABLES}
