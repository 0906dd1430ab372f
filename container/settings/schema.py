"""Every setting, declared once: its type, default, variables, flag, help and bounds.

The fields of `Settings` that are made by `setting` are the table that the reader, `mme serve --help`, `mme settings`
and the documentation walk: none can name a variable that the others do not know. `OTHERS` are variables that a rule
reads, that change nothing, or that are refused. Where several variables set one field, the one that its declaration
names first wins: MME_ before SAGEMAKER_TRITON_ before SAGEMAKER_.

The log level follows Triton's four switches: it is that of the least severe of VERBOSE, INFO, WARNING and ERROR that is
on. VERBOSE is off unless set; Triton's own default is on, and floods CloudWatch.
"""

# ruff: noqa: RUF009 - `setting` makes a field
from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from container.control.routes import InferenceType
from container.settings import parsers as v
from container.settings.parsers import BatchSize, GrpcCompression, LogFormat, Mode, PingMode, RateLimit, ResourceLimit
from model_handlers.scripts.default_script import LITERAL
from serve import options
from serve.cache.eviction import Policy
from serve.options import DEFAULT_LATENCIES, BatchGuess, Control, Latencies, Weights
from serve.sources.scripts import Scripts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from container.settings.parsers import Parser
    from container.steps.access import Restriction
    from serve.options import MemoryBudget

DEFAULT_PORT = 8080  # SageMaker's, where it names no other
DEFAULT_GRPC_PORT = 8001  # Triton's
DEFAULT_MAX_BODY = 64 << 20  # Triton's
LONGEST_INVOCATION = 3600.0  # seconds that SageMaker waits at most, in batch transform jobs and asynchronous endpoints
ASYNCHRONOUS = {"MME_REQUEST_TIMEOUT": f"{LONGEST_INVOCATION:g}"}  # variables of the latter's containers
LOOPBACK = "127.0.0.1"
ALL_MODELS = "*"  # in a list of models to load
SAGEMAKER_MODEL_DIR = Path("/opt/ml/model")

_NO_EFFECT = "no effect:"  # how the help of a variable begins that changes nothing
_PORT = v.integer(0, 65535)
_TIMEOUT = v.seconds(0.1, 3600)
_DIMENSION = v.printable(1024)


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable, as reader, messages and documentation know it."""

    name: str
    field: str  # the attribute of `Settings` that it sets
    parse: Parser  # raises ValueError with what is allowed
    help: str
    flag: str = ""
    default: str = ""  # how it is written
    many: bool = False  # what is given several times adds up

    @property
    def label(self) -> str:
        """How messages name it: by its flag too, because a value may have come either way."""
        return f"{self.flag}/{self.name}" if self.flag else self.name

    @property
    def allowed(self) -> str:
        """What the value may be, in the parser's own words."""
        try:
            self.parse("\0")
        except ValueError as error:
            return str(error)
        return "any text"

    @property
    def has_notice(self) -> bool:
        """Whether a given value is worth a log line, since it changes nothing."""
        return self.help.startswith(_NO_EFFECT)


def setting(
    default: Any,
    help: str,  # noqa: A002 - as argparse calls it
    parse: Parser | None = None,
    *,
    name: str = "",
    flag: bool = True,
    shown: str | None = None,
    many: bool = False,
    also: Mapping[str, str | tuple[str, Parser]] | None = None,
) -> Any:
    """Declare a field of `Settings` that variables set.

    Args:
        default: its value where none is given, or a function that makes it.
        help: one line for people.
        parse: a parser of `parsers`; that of the default's type where it is a switch or an enumeration.
        name: the variable; by default MME_ and the field's name.
        flag: whether a variable of ours has a flag, which is called as it is.
        shown: how the default is written, where its own text does not say it.
        many: whether what is given several times adds up.
        also: variables that set the field where those before are not given, with their help, and maybe another parser.
    """
    if parse is None:
        parse = v.boolean if isinstance(default, bool) else v.enum_of(type(default))
    if shown is None:
        text = f"{default:g}" if isinstance(default, float) else v.to_text(default)
        shown = "none" if default in (None, "", ()) else text
    row = {"parse": parse, "help": help, "name": name, "flag": flag, "shown": shown, "many": many, "also": also or {}}
    if callable(default) and not isinstance(default, Enum):
        return field(default_factory=default, metadata=row)
    return field(default=default, metadata=row)


def _as(help_text: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Variables that say what another one does, with whose they are."""
    return {name: f"{help_text}: {whose}." for name, whose in variables.items()}


def user_cache_dir(environ: Mapping[str, str]) -> Path:
    """A folder of this user's: $XDG_CACHE_HOME/mme, else in the temporary directory (on SageMaker the larger disk)."""
    if base := environ.get("XDG_CACHE_HOME"):
        return Path(base) / "mme"
    try:
        temporary = environ.get("TMPDIR") or tempfile.gettempdir()
    except FileNotFoundError:  # a container that may write nothing; MME_CACHE_DIR may say otherwise, or be needless
        temporary = "/tmp"  # noqa: S108 - a name, which cannot be made a folder
    return Path(temporary) / f"mme-{os.getuid()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that can be set; None, "" and () mean what the table says of the default.

    Times are seconds, sizes bytes; budgets are bytes (int), a share (float) or one less a reserve (`Share`).

    Attributes:
        mode: where models come from; one of `model_dir` (SINGLE), `model_store` (STORE) and `model_repository`
            (REPOSITORY, with `more_repositories`, or `repository_urls` in place of both) goes with it.
        booster_accept: `default_accept` of models that are a file of SageMaker's XGBoost and no script.
        notices: sentences to log once at start; no part of equality.
    """

    # fmt: off
    mode: Mode = Mode.SINGLE
    model_store: str = setting("", "Serve archives: TargetModel names a .tar.gz under this S3 prefix or in this "
        "folder.", v.model_store)
    model_repository: Path | None = setting(None, "Serve a Triton model repository, on disk or in S3, or several "
        "(comma-separated; the flag may be repeated). Without a control mode all its models are loaded at start.",
        v.repositories, many=True)
    model_dir: Path = setting(SAGEMAKER_MODEL_DIR, "Serve one model, as SageMaker unpacks it: the folder that holds "
        "the model's directory.", v.directory)
    load_models: tuple[str, ...] = setting((), "Models to load at start (comma-separated; the flag may be repeated). "
        "Of a repository: only these; * for all.", v.names, name="MME_LOAD_MODEL", shown="none, of a repository all",
        many=True)
    model_control_mode: Control = setting(Control.DEMAND, "Who decides which models of a repository are served. "
        "demand: all at start, any other by its first request or a load; none: all at start, for good; explicit: those "
        "named at start, and loads and unloads; poll: what the folder holds.")
    poll_seconds: float = setting(15.0, "Seconds between two looks at the repository in mode poll.",
        v.seconds(0.1, 86_400), name="MME_REPOSITORY_POLL_SECS")
    model_namespacing: bool = setting(False, "Let several repositories have models of one name, which requests call "
        "FOLDER/NAME then.")
    model_config_name: str = setting("", "Read configs/NAME.pbtxt of a model in place of its config.pbtxt, where it "
        "has one.", v.model_name)
    strict_config: bool = setting(False, "Refuse a model whose config.pbtxt leaves anything out, instead of completing "
        "it from the model file.", name="MME_DISABLE_AUTO_COMPLETE_CONFIG")
    default_batch_sizes: tuple[BatchSize, ...] = setting((), "max_batch_size of models that batch and whose "
        "config.pbtxt leaves that out: of all, or of one backend's (comma-separated; the flag may be repeated).",
        v.batch_sizes, name="MME_DEFAULT_MAX_BATCH_SIZE", shown="4, for trees 32768", many=True)
    batch_guess: BatchGuess = setting(BatchGuess.PROVE, "What is done about models whose config.pbtxt has no "
        "max_batch_size. prove: batch where the names of their dimensions say so, or once batches gave the answers of "
        "single requests; off: one request at a time.")
    host: str = setting(LOOPBACK, "Address to listen on; the first line of the log says which it is, and why.", v.host,
        shown="0.0.0.0 in a container or on a platform, else 127.0.0.1")
    port: int = setting(DEFAULT_PORT, "Port to listen on; 0 takes a free one and logs it.", _PORT)
    grpc_port: int | None = setting(None, "Port to serve KServe v2 over gRPC on, beside HTTP; 0 takes a free one and "
        "logs it.", _PORT, shown="no gRPC")
    memory_budget: MemoryBudget = setting(None, "Memory that models on the host may take together.",
        options.memory_budget, shown="what the host leaves")
    gpu_memory_budget: MemoryBudget = setting(None, "Memory that models may take of each GPU.", options.memory_budget,
        shown="what the GPU leaves",
        also={
            "SAGEMAKER_TRITON_MODEL_LOAD_GPU_LIMIT": (
            "Share of each GPU's memory for models, as MME_GPU_MEMORY_BUDGET.", v.fraction)})
    eviction: Policy = setting(Policy.LRU, "Who leaves memory first when it is full: the least recently used, the "
        "least frequently used, or by what bringing it back costs for its size and use (gdsf).")
    pins: tuple[str, ...] = setting((), "Models that never leave memory for others, by name or pattern such as bert-* "
        "(comma-separated; the flag may be repeated).", v.names, name="MME_PIN", many=True)
    min_residency: float = setting(0.0, "Seconds after its load for which a model stays in memory, whoever needs the "
        "room.", v.seconds(0, 3600))
    require_gpu: bool = setting(False, "Refuse a model whose instance group is KIND_GPU where there is no GPU, instead "
        "of running it on the CPU.")
    allow_pickle: bool = setting(False, "Load models of XGBoost that are pickles (`xgboost-model` of older "
        "containers), which may run any code of their author's.",
        shown="true where SageMaker runs the container, else false")
    weights: Weights = setting(Weights.AUTO, "How ONNX models on the CPU hold their weights: mapped from disk, once "
        "for all that share them; packed for the processor, quickest and largest; auto maps, and packs what is hot; "
        "plain keeps nothing on disk.")
    rate_limit: RateLimit = setting(RateLimit.OFF, "execution_count: instances wait for the resources that their "
        "rate_limiter names, and take turns by priority.")
    rate_limit_resources: tuple[ResourceLimit, ...] = setting((), "What there is of a resource: NAME:COUNT on every "
        "device, NAME:COUNT:DEVICE on one (comma-separated; the flag may be repeated).", v.resource_limits,
        name="MME_RATE_LIMIT_RESOURCE", shown="as much as the neediest instance wants", many=True)
    response_cache_bytes: int = setting(64 << 20, "Memory for responses to requests that come again, of models with "
        "response_cache { enable: true }; 0 for none.", v.response_cache, name="MME_RESPONSE_CACHE", shown="64MiB")
    cache_dir: Path = setting(lambda: user_cache_dir({}), "Where archives are unpacked, and environments of Python "
        "models and weights to be mapped are kept.", v.directory,
        shown="$XDG_CACHE_HOME/mme, else a folder of the user's in the temporary directory",
        also={"TRITON_AWS_MOUNT_DIRECTORY": "What MME_CACHE_DIR is."})
    disk_budget: MemoryBudget = setting(None, "Disk space that unpacked archives may take together; a share is one of "
        "the file system.", options.memory_budget, shown="80% of what is free at the start and of what they take then")
    max_archive_files: int = setting(20_000, "Files and folders that an archive may hold.", v.integer(1, 1_000_000))
    load_threads: int = setting(2, "Models that may load at once.", v.integer(1, 64))
    framework_threads: int | None = setting(None, "Threads that frameworks may have in the server's process for all "
        "models, beside one an instance.", v.integer(1, 1 << 16),
        shown="4 a processor, at least 64; no more than half of what the container's limit of processes leaves")
    load_timeout: float = setting(350.0, "Seconds for one load, download included; less than 360 where SageMaker "
        "loads, which gives up then.", v.seconds(1, 86_400))
    max_body_bytes: int = setting(DEFAULT_MAX_BODY, "Largest request body.", v.body_size, name="MME_MAX_BODY",
        shown="64MiB",
        also=_as("Largest body, as MME_MAX_BODY", {"MAX_CONTENT_LENGTH": "XGBoost's",
            "SAGEMAKER_MAX_REQUEST_SIZE": "XGBoost's and scikit-learn's", "TS_MAX_REQUEST_SIZE": "TorchServe's",
            "MMS_MAX_REQUEST_SIZE": "that of MMS"}))
    request_memory: int | None = setting(None, "Memory that requests may take together on their way, inflated sizes "
        "included, until each is answered; at least twice MME_MAX_BODY. A request that does not fit is a 503.",
        options.byte_size, shown="an eighth of the memory budget, at least 256MiB and twice MME_MAX_BODY")
    max_connections: int | None = setting(None, "Connections that there may be, over HTTP and gRPC together; one more "
        "is a 503.", v.integer(1, 1_000_000), shown="the limit of open files less half of it, at most 4096")
    allow_client_shm: bool = setting(False, "Let clients of this machine register regions of shared memory, and name "
        "them in place of tensors.")
    allow_load_overrides: bool = setting(False, "Let clients send a configuration or files with a load (`config`, "
        "`file:…`), or name a folder by POST /models where no platform does: these are code that the server runs.")
    request_timeout: float = setting(60.0, "Seconds from the arrival of one inference request to its answer, or of a "
        "streamed answer from one response to the next; then 504, while what executes goes on. So long may an "
        "execution take where the model's parameter MME_EXECUTION_TIMEOUT says nothing: then its process is ended. "
        "SageMaker gives up after 60. In a batch transform job 3600 by default: the job says how long it waits.",
        _TIMEOUT, flag=False, also={"SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "Seconds for one inference request.",
        "SAGEMAKER_MODEL_SERVER_TIMEOUT": "Seconds for one inference request.",
        **_as("Seconds for one request, as MME_REQUEST_TIMEOUT", {"SAGEMAKER_TS_RESPONSE_TIMEOUT": "PyTorch's",
            "TS_DEFAULT_RESPONSE_TIMEOUT": "TorchServe's", "MMS_DEFAULT_RESPONSE_TIMEOUT": "that of MMS",
            "SAGEMAKER_NGINX_PROXY_READ_TIMEOUT_SECONDS": "TensorFlow's",
            "SAGEMAKER_GUNICORN_TIMEOUT_SECONDS": "TensorFlow's"})})
    idle_timeout: float = setting(75.0, "Seconds a connection may lie idle between requests.", _TIMEOUT, flag=False)
    header_timeout: float = setting(15.0, "Seconds for a client to send a request's headers.", _TIMEOUT, flag=False)
    body_timeout: float = setting(60.0, "Longest pause of a body that arrives, or of an answer that is read, in "
        "seconds. From its tenth second on a body, and a message over gRPC, has to come at 1 KiB a second on average.",
        _TIMEOUT, flag=False)
    session_seconds: float = setting(1200.0, "Seconds for which a stateful session of SageMaker's clients may lie "
        "unused.", v.seconds(0.1, 604_800), also={"SAGEMAKER_SESSIONS_EXPIRATION": "As MME_SESSION_SECONDS."})
    drain_seconds: float = setting(25.0, "Seconds after SIGTERM for accepted requests to finish; SageMaker kills after "
        "30.", v.seconds(0, 600), flag=False)
    inline_microseconds: int = setting(200, "Models that take no longer than this run on the event loop when nothing "
        "waits; 0 never does.", v.integer(0, 1_000_000), flag=False)
    busy_poll_microseconds: int = setting(400, "How long the loop and models' processes stay awake for what is likely "
        "to come at once; 0 never do.", v.integer(0, 10_000), flag=False)
    ping_mode: PingMode = setting(PingMode.READY, "What a 200 from /ping means: the server lives, or the models of the "
        "start-up list are ready.", flag=False, shown="ready with one model, else live",
        also={"SAGEMAKER_TRITON_OVERRIDE_PING_MODE": "As MME_PING_MODE; wins over SAGEMAKER_TRITON_PING_MODE.",
        "SAGEMAKER_TRITON_PING_MODE": "As MME_PING_MODE."})
    log_level: str = setting("info", "Least severe level that is logged.", v.log_level,
        also={"SAGEMAKER_CONTAINER_LOG_LEVEL": "Log level, by name or number."})
    log_format: LogFormat = setting(LogFormat.AUTO, "Text for people, JSON lines for machines; auto chooses text on a "
        "terminal; default and ISO8601 are Triton's.")
    metrics_models: int = setting(10_000, "Models that have time series of their own at /metrics, the most requested "
        "ones; others have none.", v.integer(0, 1_000_000), flag=False)
    emf: bool = setting(False, "Write CloudWatch metrics to standard output, in the embedded metric format.",
        flag=False, shown="true where SageMaker runs the container, else false")
    emf_namespace: str = setting("mme", "CloudWatch namespace of those metrics.", v.namespace, flag=False)
    emf_period: float = setting(60.0, "Seconds that one line of those metrics tells of.", v.seconds(1, 3600),
        flag=False)
    emf_top_models: int = setting(0, "Metrics for each of so many models too, the most requested ones; CloudWatch "
        "bills every model's.", v.integer(0, 100), flag=False)
    endpoint_name: str = setting("unknown", "The endpoint's name in those metrics; SageMaker does not tell its "
        "containers.", _DIMENSION, flag=False)
    variant_name: str = setting("AllTraffic", "The production variant's name in those metrics.", _DIMENSION, flag=False)
    trace_url: str = setting("", "Send traces of requests there, by OpenTelemetry's protocol over HTTP.", v.trace_url)
    trace_rate: int = setting(1000, "Trace one request of so many, of those whose client does not say whether it is "
        "traced; 0: none of those.", v.integer(0, 1_000_000_000))
    trace_level: tuple[str, ...] = setting(("TIMESTAMPS",), "What is told of a request that is traced, OFF for nothing "
        "until Triton's trace extension asks for something; TENSORS is without effect (the flag may be repeated).",
        v.trace_levels, many=True)
    trace_count: int = setting(-1, "Trace so many requests, and then no more; -1: all.", v.integer(-1, 1_000_000_000))
    trace_file: Path | None = setting(None, "Write traces of requests there when the server ends, in Triton's own "
        "format.", v.file)
    trace_log_frequency: int = setting(0, "Write so many traces at a time, to that file with .0, .1, … behind its "
        "name; 0 writes all at the end.", v.integer(0, 1_000_000))
    json_nonfinite: str = setting("null", "How answers in JSON say NaN and infinities: null, which every parser takes "
        "and which is NaN again where a model's input is of a floating type; or NaN, Infinity and -Infinity, as Triton "
        "writes them (literal).", v.choice("null", LITERAL), flag=False)
    dashboard: bool = setting(True, "Serve a page of what happens at /dashboard, to whoever can reach the port; "
        "through SageMaker nobody can.", flag=False)
    server_id: str = setting("mme", "What the server calls itself in its metadata.", v.printable(255))
    allowed_hosts: tuple[str, ...] = setting((), "Hosts besides localhost that a server on loopback answers to, and "
        "whose pages may change something; *.example.com is all below it (comma-separated; the flag may be repeated).",
        v.hosts, many=True)
    tls_cert: Path | None = setting(None, "Serve HTTP, metrics and gRPC by TLS alone, with this certificate and those "
        "in between, in PEM; files of TLS are read again when they change.", v.file)
    tls_key: Path | None = setting(None, "Its private key, in PEM.", v.file)
    tls_client_ca: Path | None = setting(None, "Have each client show a certificate that one of these, in PEM, vouches "
        "for.", v.file)
    key_file: Path | None = setting(None, "Have each client send a key, over HTTP and gRPC; the file has a line for "
        "each, as `mme key` prints it, and is read again when it changes.", v.file)
    http_restrictions: tuple[Restriction, ...] = setting((), "Parts of the API for those alone who send a header, "
        "CATEGORY,CATEGORY:HEADER=VALUE (may be repeated).", v.restrictions, name="MME_HTTP_RESTRICTED_API", many=True)
    grpc_restrictions: tuple[Restriction, ...] = setting((), "The same over gRPC, where metadata are called "
        "triton-grpc-protocol-HEADER.", v.restrictions, name="MME_GRPC_RESTRICTED_PROTOCOL", many=True)
    http_header_pattern: str = setting("", "Hand headers whose names match to models, as parameters of the request.",
        v.header_pattern, name="MME_HTTP_HEADER_FORWARD_PATTERN")
    grpc_header_pattern: str = setting("", "The same of gRPC's metadata.", v.header_pattern,
        name="MME_GRPC_HEADER_FORWARD_PATTERN")
    grpc_keepalive: tuple[str, ...] = setting((), "gRPC's pings and how old its connections may grow, as "
        "time=7200000,timeout=20000 (the flag may be repeated).", v.keepalive, shown="gRPC's own", many=True)
    grpc_use_ssl: bool = setting(False, "Serve gRPC by TLS alone, with the certificate and the key below.",
        shown="true with MME_TLS_CERT, else false")
    grpc_use_ssl_mutual: bool = setting(False, "The same, and have each client show a certificate that "
        "MME_GRPC_ROOT_CERT vouches for.")
    grpc_server_cert: Path | None = setting(None, "Certificate of gRPC's server, and of those in between, in PEM.",
        v.file, shown="that of MME_TLS_CERT")
    grpc_server_key: Path | None = setting(None, "Its private key, in PEM.", v.file, shown="that of MME_TLS_KEY")
    grpc_root_cert: Path | None = setting(None, "Certificates in PEM of who vouches for clients.", v.file,
        shown="those of MME_TLS_CLIENT_CA")
    grpc_compression: GrpcCompression = setting(GrpcCompression.NONE, "How much answers over gRPC are compressed, by "
        "what the client can read: gzip for low, deflate above.", name="MME_GRPC_INFER_RESPONSE_COMPRESSION_LEVEL")
    grpc_address: str = setting("", "Address to listen on for gRPC.", v.host, shown="that of MME_HOST")
    metrics_address: str = setting("", "Address to listen on at the port for metrics alone.", v.host,
        shown="that of MME_HOST")
    metrics_port: int | None = setting(None, "Port that answers /metrics alone, which the main port does too; 0 takes "
        "a free one and logs it.", v.integer(0, 65535))
    latencies: Latencies = setting(DEFAULT_LATENCIES, "Which latencies are among the metrics, as "
        "summary_latencies=true (the flag may be repeated).", v.latencies, name="MME_METRICS_CONFIG",
        shown="counter_latencies=true", many=True)
    batch_transform: bool = setting(False, "Set by a batch transform job.", name="SAGEMAKER_BATCH")
    max_payload_in_mb: int = setting(6, "Largest body of a batch transform (0: no limit of the job's); raises "
        "MME_MAX_BODY where larger.", v.integer(0, v.MOST_PAYLOAD_MB), name="SAGEMAKER_MAX_PAYLOAD_IN_MB")
    batch_strategy: str = setting("SINGLE_RECORD", "Told to SageMaker by /execution-parameters.",
        v.choice("SINGLE_RECORD", "MULTI_RECORD"), name="SAGEMAKER_BATCH_STRATEGY")
    max_concurrent_transforms: int = setting(8, "Told to SageMaker by /execution-parameters.", v.integer(1, 1000),
        name="SAGEMAKER_MAX_CONCURRENT_TRANSFORMS")
    default_accept: str = setting("application/json", "Content type of answers to requests without an Accept header; "
        "for tensors JSON or Triton's binary form.", v.media_type, name="SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT")
    script_workers: int = setting(1, "Processes of each inference script; models with a config.pbtxt say it there.",
        v.integer(1, 64), name="SAGEMAKER_MODEL_SERVER_WORKERS",
        also=_as("Processes of a script, as SAGEMAKER_MODEL_SERVER_WORKERS", {
            "SAGEMAKER_NUM_MODEL_WORKERS": "XGBoost's and scikit-learn's", "SAGEMAKER_TS_MIN_WORKERS": "PyTorch's",
            "TS_DEFAULT_WORKERS_PER_MODEL": "TorchServe's", "MMS_DEFAULT_WORKERS_PER_MODEL": "those of MMS"}))
    script_program: str = setting("inference.py", "File name of inference scripts, in `code/` of an archive or at its "
        "root.", v.script_name, name="SAGEMAKER_PROGRAM")
    script_directory: str = setting("", "The inference script of models that bring none: a folder, or an archive of "
        "it, here or in S3; /opt/ml/model/code means each model's own.", v.submit_directory,
        name="SAGEMAKER_SUBMIT_DIRECTORY")
    script_task: str = setting("", "What a model of Hugging Face's libraries is asked that brings no inference script.",
        v.task, name="HF_TASK", shown="what its architecture is made for")
    script_saved_model: str = setting("", "Of several of TensorFlow's SavedModels in one archive the one that is asked "
        "where a client names none.", v.model_name, name="SAGEMAKER_TFS_DEFAULT_MODEL_NAME", shown="the first by name")
    sessions: bool = setting(True, "Whether clients may have stateful sessions (SessionId in boto3).",
        name="SAGEMAKER_ENABLE_STATEFUL_SESSIONS")
    default_model_name: str = setting("", "The model that /invocations asks where no header names a target model.",
        v.model_name, name="SAGEMAKER_TRITON_DEFAULT_MODEL_NAME",
        shown="the only directory in the model directory; of many models none")
    inference_type: InferenceType = setting(InferenceType.INFER, "What bodies of /invocations mean: tensors (infer), "
        "or Triton's flat JSON with one answer or several.", v.inference_type, name="SAGEMAKER_TRITON_INFERENCE_TYPE")
    shared_memory_bytes: int = setting(64 << 10, "Bytes of the memory first shared with a model's process; it grows "
        "with what a batch needs.", v.integer(1, 2**40), name="SAGEMAKER_TRITON_SHM_DEFAULT_BYTE_SIZE")
    shared_memory_growth_bytes: int = setting(0, "Bytes by which it grows at least; it doubles where that is more.",
        v.integer(1, 2**40), name="SAGEMAKER_TRITON_SHM_GROWTH_BYTE_SIZE")
    cloud_credentials: Path | None = setting(None, "JSON file with the credentials of model repositories in S3, by "
        "their prefixes, as Triton has it.", v.file, name="TRITON_CLOUD_CREDENTIAL_PATH",
        shown="none, those that boto3 finds")
    script_output: tuple[str, ...] = setting((), "What XGBoost answers for each row, comma-separated: its selectable "
        "inference, which Autopilot sets. A key that the model's objective has nothing for is null, in CSV nan.",
        v.selected, name="SAGEMAKER_INFERENCE_OUTPUT", shown="its prediction")
    more_repositories: tuple[Path, ...] = ()
    repository_urls: tuple[str, ...] = ()
    booster_accept: str = "text/csv"
    notices: tuple[str, ...] = field(default=(), compare=False)
    # fmt: on

    @property
    def literal_json(self) -> bool:
        """Whether JSON says NaN and Infinity in place of null."""
        return self.json_nonfinite == LITERAL

    @property
    def repositories(self) -> tuple[Path | str, ...]:
        if self.repository_urls:
            return self.repository_urls
        return () if self.model_repository is None else (self.model_repository, *self.more_repositories)

    @property
    def scripts(self) -> Scripts:
        """What is the same for all inference scripts."""
        return Scripts(
            self.script_program,
            self.script_directory,
            self.script_workers,
            self.default_accept,
            self.model_config_name,
            self.strict_config,
            tuple((each.backend, each.size) for each in self.default_batch_sizes),
            self.booster_accept,
            self.batch_transform,
            self.script_task,
            self.script_saved_model,
            self.allow_pickle,
            self.literal_json,
            self.script_output,
        )


def ruled(name: str, parse: Parser, help_text: str, default: str = "") -> Variable:
    """A variable that sets no field by itself: a rule reads it, or it is refused."""
    return Variable(name, "", parse, help_text, default=default)


def idle(name: str, why: str, parse: Parser = str) -> Variable:
    return Variable(name, "", parse, f"{_NO_EFFECT} {why}")


# fmt: off
_IDLE = {  # why variables of any text change nothing
    "nothing is downloaded from Hugging Face: put the model's files into its archive.":
        "HF_API_TOKEN HF_MODEL_ID HF_MODEL_REVISION",
    "models are not compiled for Neuron.":
        "HF_OPTIMUM_BATCH_SIZE HF_OPTIMUM_SEQUENCE_LENGTH",
    "there is no Java machine here.":
        "SAGEMAKER_DISABLE_CONTAINER_SUPPORT SAGEMAKER_MAX_DIRECT_MEMORY_SIZE SAGEMAKER_MAX_HEAP_SIZE "
        "SAGEMAKER_MODEL_SERVER_VMARGS",
    "there is no nginx or gunicorn in front of models here.":
        "SAGEMAKER_GUNICORN_LOGLEVEL SAGEMAKER_GUNICORN_WORKER_CLASS SAGEMAKER_TFS_NGINX_LOGLEVEL SAGEMAKER_USE_NGINX",
    "it tells Autopilot's own tools what a container takes or could answer, and no container.":
        "SAGEMAKER_INFERENCE_INPUT SAGEMAKER_INFERENCE_SUPPORTED",
    "a request to a script, or to a SavedModel without one, is computed by itself.":
        "SAGEMAKER_TFS_BATCH_TIMEOUT_MICROS SAGEMAKER_TFS_ENABLE_BATCHING SAGEMAKER_TFS_MAX_BATCH_SIZE "
        "SAGEMAKER_TFS_MAX_ENQUEUED_BATCHES SAGEMAKER_TFS_NUM_BATCH_THREADS SAGEMAKER_TS_BATCH_SIZE "
        "SAGEMAKER_TS_MAX_BATCH_DELAY",
    "each model says in its config.pbtxt how many threads it has.":
        "SAGEMAKER_TFS_INTER_OP_PARALLELISM SAGEMAKER_TFS_INTRA_OP_PARALLELISM",
}
OTHERS = (
    ruled("AZUREML_MODEL_DIR", v.directory, "Set by Azure ML: a folder that is served as a Triton model repository, or "
        "the one in it that holds models, unless another variable says where models come from.", "unset"),
    idle("CA_REPOSITORY_ARN", "packages of a requirements.txt come from the index that pip is told of."),
    idle("HF_TRUST_REMOTE_CODE", "a pipeline runs the code of the installed transformers alone."),
    idle("SAGEMAKER_BASE_DIR", "/opt/ml is the default.", v.same_folder("/opt/ml", "MME_MODEL_DIR")),
    ruled("SAGEMAKER_BIND_TO_PORT", v.integer(1, 65535), "Port to listen on; wins over MME_PORT, because SageMaker "
        "calls no other.", "unset"),
    idle("SAGEMAKER_GUNICORN_THREADS", "a script's process answers one request at a time."),
    idle("SAGEMAKER_GUNICORN_WORKERS", "SAGEMAKER_MODEL_SERVER_WORKERS says how many processes a script has."),
    idle("SAGEMAKER_HANDLER", "what Amazon's own service does is done for every script.", v.handler_service),
    idle("SAGEMAKER_MODEL_JOB_QUEUE_SIZE", "requests wait as long as MME_REQUEST_TIMEOUT says."),
    idle("SAGEMAKER_MODEL_PATH", "/opt/ml/model is the default.", v.same_folder("/opt/ml/model", "MME_MODEL_DIR")),
    ruled("SAGEMAKER_MULTI_MODEL", v.boolean, "true: SageMaker loads and unloads models through /models.", "false"),
    ruled("SAGEMAKER_MULTI_MODEL_UNIVERSAL_BUCKET", v.universal_script, "Refused: name the archive of the script for "
        "all models by SAGEMAKER_SUBMIT_DIRECTORY."),
    ruled("SAGEMAKER_MULTI_MODEL_UNIVERSAL_PREFIX", v.universal_script,
        "Refused: see SAGEMAKER_MULTI_MODEL_UNIVERSAL_BUCKET."),
    idle("SAGEMAKER_REGION", "boto3 reads AWS_REGION."),
    ruled("SAGEMAKER_SAFE_PORT_RANGE", v.port_range, "Ports that a container may choose for itself. Checked for every "
        "port but 8080 and SAGEMAKER_BIND_TO_PORT, which SageMaker chose.", "unset"),
    idle("SAGEMAKER_SESSIONS_PATH", "sessions live in memory, with what their models know of them."),
    idle("SAGEMAKER_STARTUP_TIMEOUT", "the server answers at once, and each load has MME_LOAD_TIMEOUT.",
        v.integer(0, 86_400)),
    idle("SAGEMAKER_TFS_FRACTIONAL_GPU_MEM_MARGIN", "MME_GPU_MEMORY_BUDGET bounds memory of GPUs."),
    idle("SAGEMAKER_TFS_INSTANCE_COUNT", "SAGEMAKER_MODEL_SERVER_WORKERS says how many processes a model has."),
    idle("SAGEMAKER_TFS_VERSION", "the installed TensorFlow serves models of any version."),
    idle("SAGEMAKER_TFS_WAIT_TIME_SECONDS", "each load has MME_LOAD_TIMEOUT."),
    ruled("SAGEMAKER_TRITON_ADDITIONAL_ARGS", str, "Flags of tritonserver; the few that mean something here are "
        "translated, any other is refused."),
    ruled("SAGEMAKER_TRITON_ALLOW_GRPC", v.boolean, "true: KServe v2 over gRPC as well, as MME_GRPC_PORT.", "false"),
    ruled("SAGEMAKER_TRITON_ALLOW_METRICS", v.boolean, "true: /metrics at SAGEMAKER_TRITON_METRICS_PORT as well, if "
        "that is set; on the main port it is always there.", "false"),
    idle("SAGEMAKER_TRITON_BUFFER_MANAGER_THREAD_COUNT", "tensors are gathered by the thread that executes the batch.",
        v.integer(0, 1024)),
    idle("SAGEMAKER_TRITON_DISABLE_MODEL_NAMESPACING", "every archive is a namespace of its own.", v.boolean),
    ruled("SAGEMAKER_TRITON_GRPC_PORT", _PORT, "Port of gRPC with SAGEMAKER_TRITON_ALLOW_GRPC=true; must lie in "
        "SAGEMAKER_SAFE_PORT_RANGE.", "8001"),
    ruled("SAGEMAKER_TRITON_LOG_ERROR", v.log_switch, "false, and the others too: level critical.", "true"),
    ruled("SAGEMAKER_TRITON_LOG_INFO", v.log_switch, "false: level warning.", "true"),
    ruled("SAGEMAKER_TRITON_LOG_VERBOSE", v.log_switch, "true or above 0: level debug.", "false"),
    ruled("SAGEMAKER_TRITON_LOG_WARNING", v.log_switch, "false, and INFO too: level error.", "true"),
    ruled("SAGEMAKER_TRITON_METRICS_PORT", _PORT, "Port of metrics with SAGEMAKER_TRITON_ALLOW_METRICS=true; must lie "
        "in SAGEMAKER_SAFE_PORT_RANGE.", "none"),
    idle("SAGEMAKER_TRITON_TENSORFLOW_VERSION", "TensorFlow 2 serves models of either.", v.integer(1, 2)),
    idle("SAGEMAKER_TRITON_THREAD_COUNT", "one event loop answers every connection.", v.integer(1, 1024)),
    idle("SAGEMAKER_TS_MAX_WORKERS", "a script has as many processes as it begins with."),
    idle("SM_MODEL_DIR", "/opt/ml/model is the default.", v.same_folder("/opt/ml/model", "MME_MODEL_DIR")),
    *[idle(name, why) for why, names in _IDLE.items() for name in names.split()],
)
# fmt: on


def _variables_of_fields() -> Iterator[Variable]:
    for each in fields(Settings):
        if not (row := each.metadata):
            continue
        name = row["name"] or f"MME_{each.name.upper()}"
        ours = name.startswith("MME_")
        flag = f"--{name.removeprefix('MME_').lower().replace('_', '-')}" if ours and row["flag"] else ""
        yield Variable(name, each.name, row["parse"], row["help"], flag, row["shown"], row["many"])
        for other, said in row["also"].items():
            help_text, parse = said if isinstance(said, tuple) else (said, row["parse"])
            yield Variable(other, each.name, parse, help_text)


VARIABLES = (  # of one field: in the order in which they win
    *_variables_of_fields(),
    *sorted(OTHERS, key=lambda each: each.name),
)
BY_NAME = {variable.name: variable for variable in VARIABLES}
FLAGS = {variable.flag: variable for variable in VARIABLES if variable.flag}


def settings_table() -> list[tuple[str, str, str, str, str]]:
    """Every variable as (name, flag, default, allowed, help), for people: ours as they are declared, others by name."""
    ours = [variable for variable in VARIABLES if variable.name.startswith("MME_")]
    others = sorted((variable for variable in VARIABLES if variable not in ours), key=lambda each: each.name)
    return [(row.name, row.flag, row.default, row.allowed, row.help) for row in (*ours, *others)]
