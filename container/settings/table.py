"""Every variable that decides how the server runs, as data: its name, what it sets, what it may be, what it does.

The parser, `mme serve --help`, `mme settings` and the documentation all read this table, so none can name a variable
that the others do not know. Here are our own, with those of `table_protocol`; `table_sagemaker` holds SageMaker's and
Triton's, `azureml` Azure's one.
Where several variables set one field, the row that comes first wins: MME_ before SAGEMAKER_TRITON_ before SAGEMAKER_.
"""

from __future__ import annotations

from container.settings import values as v
from container.settings.azureml import AZUREML_VARIABLES
from container.settings.kinds import LogFormat, PingMode, RateLimit, ours
from container.settings.table_containers import CONTAINER_VARIABLES
from container.settings.table_protocol import PROTOCOL_VARIABLES
from container.settings.table_sagemaker import SAGEMAKER_VARIABLES, TRITON_VARIABLES
from model_handlers.scripts.default_script import LITERAL
from serve.cache.eviction import Policy
from serve.control import BatchGuess, Control, Weights
from serve.sizes import byte_size, memory_budget

_PORT = v.integer(0, 65535)
_TIMEOUT = v.seconds(0.1, 3600)
_DIMENSION = v.printable(1024)

MME_VARIABLES = (
    ours(
        "MME_MODEL_STORE",
        v.model_store,
        "Serve archives: TargetModel names a .tar.gz under this S3 prefix or in this folder.",
        default="none",
    ),
    ours(
        "MME_MODEL_REPOSITORY",
        v.repositories,
        "Serve a Triton model repository, on disk or in S3, or several (comma-separated; the flag may be repeated). "
        "Without a control mode all its models are loaded at start.",
        default="none",
    ),
    ours(
        "MME_MODEL_DIR",
        v.directory,
        "Serve one model, as SageMaker unpacks it: the folder that holds the model's directory.",
        default="/opt/ml/model",
    ),
    ours(
        "MME_LOAD_MODEL",
        v.names,
        "Models to load at start (comma-separated; the flag may be repeated). Of a repository: only these; * for all.",
        default="none, of a repository all",
        field="load_models",
    ),
    ours(
        "MME_MODEL_CONTROL_MODE",
        v.enum_of(Control),
        "Who decides which models of a repository are served. demand: all at start, any other by its first request or "
        "a load; none: all at start, for good; explicit: those named at start, and loads and unloads; poll: what the "
        "folder holds.",
    ),
    ours(
        "MME_REPOSITORY_POLL_SECS",
        v.seconds(0.1, 86_400),
        "Seconds between two looks at the repository in mode poll.",
        field="poll_seconds",
    ),
    ours(
        "MME_MODEL_NAMESPACING",
        v.boolean,
        "Let several repositories have models of one name, which requests call FOLDER/NAME then.",
    ),
    ours(
        "MME_MODEL_CONFIG_NAME",
        v.model_name,
        "Read configs/NAME.pbtxt of a model in place of its config.pbtxt, where it has one.",
        default="none",
    ),
    ours(
        "MME_DISABLE_AUTO_COMPLETE_CONFIG",
        v.boolean,
        "Refuse a model whose config.pbtxt leaves anything out, instead of completing it from the model file.",
        field="strict_config",
    ),
    ours(
        "MME_DEFAULT_MAX_BATCH_SIZE",
        v.batch_sizes,
        "max_batch_size of models that batch and whose config.pbtxt leaves that out: of all, or of one backend's "
        "(comma-separated; the flag may be repeated).",
        default="4, for trees 32768",
        field="default_batch_sizes",
    ),
    ours(
        "MME_BATCH_GUESS",
        v.enum_of(BatchGuess),
        "What is done about models whose config.pbtxt has no max_batch_size. prove: batch where the names of their "
        "dimensions say so, or once batches gave the answers of single requests; off: one request at a time.",
    ),
    ours(
        "MME_HOST",
        v.host,
        "Address to listen on; the first line of the log says which it is, and why.",
        default="0.0.0.0 in a container or on a platform, else 127.0.0.1",
    ),
    ours("MME_PORT", _PORT, "Port to listen on; 0 takes a free one and logs it."),
    ours(
        "MME_GRPC_PORT",
        _PORT,
        "Port to serve KServe v2 over gRPC on, beside HTTP; 0 takes a free one and logs it.",
        default="no gRPC",
    ),
    ours(
        "MME_MEMORY_BUDGET",
        memory_budget,
        "Memory that models on the host may take together.",
        default="what the host leaves",
    ),
    ours(
        "MME_GPU_MEMORY_BUDGET",
        memory_budget,
        "Memory that models may take of each GPU.",
        default="what the GPU leaves",
    ),
    ours(
        "MME_EVICTION",
        v.enum_of(Policy),
        "Who leaves memory first when it is full: the least recently used, the least frequently used, or by what "
        "bringing it back costs for its size and use (gdsf).",
    ),
    ours(
        "MME_PIN",
        v.names,
        "Models that never leave memory for others, by name or pattern such as bert-* (comma-separated; the flag may "
        "be repeated).",
        default="none",
        field="pins",
    ),
    ours(
        "MME_MIN_RESIDENCY",
        v.seconds(0, 3600),
        "Seconds after its load for which a model stays in memory, whoever needs the room.",
    ),
    ours(
        "MME_REQUIRE_GPU",
        v.boolean,
        "Refuse a model whose instance group is KIND_GPU where there is no GPU, instead of running it on the CPU.",
    ),
    ours(
        "MME_ALLOW_PICKLE",
        v.boolean,
        "Load models of XGBoost that are pickles (`xgboost-model` of older containers), which may run any code of "
        "their author's.",
        default="true where SageMaker runs the container, else false",
    ),
    ours(
        "MME_WEIGHTS",
        v.enum_of(Weights),
        "How ONNX models on the CPU hold their weights: mapped from disk, once for all that share them; packed for the "
        "processor, quickest and largest; auto maps, and packs what is hot; plain keeps nothing on disk.",
    ),
    ours(
        "MME_RATE_LIMIT",
        v.enum_of(RateLimit),
        "execution_count: instances wait for the resources that their rate_limiter names, and take turns by priority.",
    ),
    ours(
        "MME_RATE_LIMIT_RESOURCE",
        v.resource_limits,
        "What there is of a resource: NAME:COUNT on every device, NAME:COUNT:DEVICE on one (comma-separated; the flag "
        "may be repeated).",
        default="as much as the neediest instance wants",
        field="rate_limit_resources",
    ),
    ours(
        "MME_RESPONSE_CACHE",
        v.response_cache,
        "Memory for responses to requests that come again, of models with response_cache { enable: true }; 0 for none.",
        default="64MiB",
        field="response_cache_bytes",
    ),
    ours(
        "MME_CACHE_DIR",
        v.directory,
        "Where archives are unpacked, and environments of Python models and weights to be mapped are kept.",
        default="$XDG_CACHE_HOME/mme, else a folder of the user's in the temporary directory",
    ),
    ours(
        "MME_DISK_BUDGET",
        memory_budget,
        "Disk space that unpacked archives may take together; a share is one of the file system.",
        default="80% of what is free at the start and of what they take then",
    ),
    ours("MME_MAX_ARCHIVE_FILES", v.integer(1, 1_000_000), "Files and folders that an archive may hold."),
    ours("MME_LOAD_THREADS", v.integer(1, 64), "Models that may load at once."),
    ours(
        "MME_FRAMEWORK_THREADS",
        v.integer(1, 1 << 16),
        "Threads that frameworks may have in the server's process for all models, beside one an instance.",
        default="4 a processor, at least 64; no more than half of what the container's limit of processes leaves",
    ),
    ours(
        "MME_LOAD_TIMEOUT",
        v.seconds(1, 86_400),
        "Seconds for one load, download included; less than 360 where SageMaker loads, which gives up then.",
    ),
    ours("MME_MAX_BODY", v.body_size, "Largest request body.", default="64MiB", field="max_body_bytes"),
    ours(
        "MME_REQUEST_MEMORY",
        byte_size,
        "Memory that requests may take together on their way, inflated sizes included, until each is answered; at "
        "least twice MME_MAX_BODY. A request that does not fit is a 503.",
        default="an eighth of the memory budget, at least 256MiB and twice MME_MAX_BODY",
    ),
    ours(
        "MME_MAX_CONNECTIONS",
        v.integer(1, 1_000_000),
        "Connections that there may be, over HTTP and gRPC together; one more is a 503.",
        default="the limit of open files less half of it, at most 4096",
    ),
    ours(
        "MME_ALLOW_CLIENT_SHM",
        v.boolean,
        "Let clients of this machine register regions of shared memory, and name them in place of tensors.",
    ),
    ours(
        "MME_ALLOW_LOAD_OVERRIDES",
        v.boolean,
        "Let clients send a configuration or files with a load (`config`, `file:…`), or name a folder by "
        "POST /models where no platform does: these are code that the server runs.",
    ),
    ours(
        "MME_REQUEST_TIMEOUT",
        _TIMEOUT,
        "Seconds from the arrival of one inference request to its answer, or of a streamed answer from one response to "
        "the next; then 504, while what executes goes on. So long may an execution take where the model's parameter "
        "MME_EXECUTION_TIMEOUT says nothing: then its process is ended. SageMaker gives up after 60. In a batch "
        "transform job 3600 by default: the job says how long it waits.",
        flag=False,
    ),
    ours("MME_IDLE_TIMEOUT", _TIMEOUT, "Seconds a connection may lie idle between requests.", flag=False),
    ours("MME_HEADER_TIMEOUT", _TIMEOUT, "Seconds for a client to send a request's headers.", flag=False),
    ours(
        "MME_BODY_TIMEOUT",
        _TIMEOUT,
        "Longest pause of a body that arrives, or of an answer that is read, in seconds. From its tenth second on a "
        "body, and a message over gRPC, has to come at 1 KiB a second on average.",
        flag=False,
    ),
    ours(
        "MME_SESSION_SECONDS",
        v.seconds(0.1, 604_800),
        "Seconds for which a stateful session of SageMaker's clients may lie unused.",
    ),
    ours(
        "MME_DRAIN_SECONDS",
        v.seconds(0, 600),
        "Seconds after SIGTERM for accepted requests to finish; SageMaker kills after 30.",
        flag=False,
    ),
    ours(
        "MME_INLINE_MICROSECONDS",
        v.integer(0, 1_000_000),
        "Models that take no longer than this run on the event loop when nothing waits; 0 never does.",
        flag=False,
    ),
    ours(
        "MME_BUSY_POLL_MICROSECONDS",
        v.integer(0, 10_000),
        "How long the loop and models' processes stay awake for what is likely to come at once; 0 never do.",
        flag=False,
    ),
    ours(
        "MME_PING_MODE",
        v.enum_of(PingMode),
        "What a 200 from /ping means: the server lives, or the models of the start-up list are ready.",
        default="ready with one model, else live",
        flag=False,
    ),
    ours("MME_LOG_LEVEL", v.log_level, "Least severe level that is logged."),
    ours(
        "MME_LOG_FORMAT",
        v.enum_of(LogFormat),
        "Text for people, JSON lines for machines; auto chooses text on a terminal; default and ISO8601 are Triton's.",
    ),
    ours(
        "MME_METRICS_MODELS",
        v.integer(0, 1_000_000),
        "Models that have time series of their own at /metrics, the most requested ones; others have none.",
        flag=False,
    ),
    ours(
        "MME_EMF",
        v.boolean,
        "Write CloudWatch metrics to standard output, in the embedded metric format.",
        default="true where SageMaker runs the container, else false",
        flag=False,
    ),
    ours("MME_EMF_NAMESPACE", v.namespace, "CloudWatch namespace of those metrics.", flag=False),
    ours("MME_EMF_PERIOD", v.seconds(1, 3600), "Seconds that one line of those metrics tells of.", flag=False),
    ours(
        "MME_EMF_TOP_MODELS",
        v.integer(0, 100),
        "Metrics for each of so many models too, the most requested ones; CloudWatch bills every model's.",
        flag=False,
    ),
    ours(
        "MME_ENDPOINT_NAME",
        _DIMENSION,
        "The endpoint's name in those metrics; SageMaker does not tell its containers.",
        default="unknown",
        flag=False,
    ),
    ours("MME_VARIANT_NAME", _DIMENSION, "The production variant's name in those metrics.", flag=False),
    ours(
        "MME_TRACE_URL",
        v.trace_url,
        "Send traces of requests there, by OpenTelemetry's protocol over HTTP.",
        default="none",
    ),
    ours(
        "MME_TRACE_RATE",
        v.integer(0, 1_000_000_000),
        "Trace one request of so many, of those whose client does not say whether it is traced; 0: none of those.",
    ),
    ours(
        "MME_TRACE_LEVEL",
        v.trace_levels,
        "What is told of a request that is traced, OFF for nothing until Triton's trace extension asks for something; "
        "TENSORS is without effect (the flag may be repeated).",
    ),
    ours("MME_TRACE_COUNT", v.integer(-1, 1_000_000_000), "Trace so many requests, and then no more; -1: all."),
    ours(
        "MME_TRACE_FILE",
        v.file,
        "Write traces of requests there when the server ends, in Triton's own format.",
        default="none",
    ),
    ours(
        "MME_TRACE_LOG_FREQUENCY",
        v.integer(0, 1_000_000),
        "Write so many traces at a time, to that file with .0, .1, … behind its name; 0 writes all at the end.",
    ),
    ours(
        "MME_JSON_NONFINITE",
        v.choice("null", LITERAL),
        "How answers in JSON say NaN and infinities: null, which every parser takes and which is NaN again where a "
        "model's input is of a floating type; or NaN, Infinity and -Infinity, as Triton writes them (literal).",
        flag=False,
    ),
    ours(
        "MME_DASHBOARD",
        v.boolean,
        "Serve a page of what happens at /dashboard, to whoever can reach the port; through SageMaker nobody can.",
        flag=False,
    ),
    *PROTOCOL_VARIABLES,
)

VARIABLES = MME_VARIABLES + TRITON_VARIABLES + SAGEMAKER_VARIABLES + CONTAINER_VARIABLES + AZUREML_VARIABLES
BY_NAME = {variable.name: variable for variable in VARIABLES}
